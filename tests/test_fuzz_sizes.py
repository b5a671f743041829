"""Random sizes of sources, outputs, batches and blocks: a command decodes with them or refuses them in a
sentence, in time and within a few gigabytes. A separate process with a bounded address space runs the
commands.
"""

import json
import random
from collections import Counter

import pytest
from hostile import GIGABYTES, Reader, check_refused

COUNT = 100  # command lines
SECONDS = 120  # programs of new shapes are compiled
FLAGS = (
    "max-source-length",
    "max-new-tokens",
    "batch-size",
    "block-size",
    "max-block-size",
    "limit",
    "top-k",
)
LARGE = ("1000", "131073", "1000000", "2147483647", "2147483648", "4294967296")
ODD = ("0", "-1", "1.5", "1e9", "1_0", "+5", " 5", "007", "0x10", "\u0663", "nan", "", "None", "adaptive")
DIGITS = tuple(sign + "9" * count for sign in ("", "-") for count in (19, 20, 40, 400, 5000))


@pytest.fixture(scope="module")
def run(t5_pair):
    reader = Reader([t5_pair / "drafter"], SECONDS, bounded=True)
    yield lambda *flags: reader(json.dumps(flags), "command")
    reader.stop()


def drawn(number):
    """Flags with sizes, one or two of them hostile."""
    rng = random.Random(number)
    values = {"max-source-length": "32", "max-new-tokens": "16", "batch-size": "1"}
    for _ in range(rng.choice((1, 1, 2))):
        values[rng.choice(FLAGS)] = rng.choice(rng.choice((LARGE, ODD, DIGITS)))
    return [f"--{name}={value}" for name, value in values.items()]


@pytest.mark.full
def test_every_size_is_decoded_with_or_refused(run, t5_pair):
    pair = [f"--{role}={t5_pair / role}" for role in ("drafter", "verifier")]
    kinds = Counter()
    for number in range(COUNT):
        flags = drawn(number)
        outcome = run("decode", *pair, "--text=the cat", *flags)
        kinds[outcome.kind] += 1
        try:
            if outcome.kind != "loaded":
                check_refused(outcome)
            assert outcome.gigabytes < GIGABYTES, outcome
        except AssertionError as error:
            raise AssertionError(f"{[flag[:60] for flag in flags]}: {error}") from None
    assert kinds["loaded"] and kinds["ValueError"], kinds
