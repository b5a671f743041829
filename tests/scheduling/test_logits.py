"""NaN logits end their own request and no other."""

import numpy as np
import pytest
from served_toys import Digits
from toys import pair

from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.scheduling.scheduler import LogitsError
from speccascade_jax.settings import Settings

TEXTS = ["200", "202", "201", "012", "1", "120"]
BROKEN = {2, 4}  # those that end in 1
CHOICES = {
    "greedy": {"method": "speculative"},
    "sampled": {"temperature": 1.0},
    "stopped": {"temperature": 1.0, "stop": ("22",)},
    "verifier": {"method": "verifier", "temperature": 1.0},
}


def sound():
    cascade = pair()
    cascade.tokenizer = Digits()
    return cascade


def damaged():
    """The toy pair, whose verifier gives no numbers after a prompt that ends in 1."""
    cascade = sound()
    verifier = cascade.params[1].copy()
    verifier[1, 3] = np.nan
    cascade.params = (cascade.params[0], verifier)
    return cascade


def results(cascade, batch_size, **fields):
    """What the scheduler makes of TEXTS, in order."""
    settings = cascade.checked(Settings(**{"method": "opt", "alpha": 0.1, "block_size": 2, **fields}), {})
    [lane] = cascade.lanes([settings]).values()
    rows, _ = cascade.encode(TEXTS)
    scheduler, ended = cascade.scheduler(lane.plan, lane.params, batch_size), {}
    ids = scheduler.admit(
        Request(row, settings, number, lane.numbers(settings), settings.stop)
        for number, row in enumerate(rows)
    )
    while scheduler.busy:
        scheduler.run(rounds=1)
        ended |= dict(scheduler.finished())
    return [ended[number] for number in ids]


@pytest.mark.full(quick=["4-greedy"])
@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_row_that_is_not_numbers_ends_alone(kind, batch_size):
    wanted, broken = (results(cascade, batch_size, **CHOICES[kind]) for cascade in (sound(), damaged()))
    assert {number for number, result in enumerate(broken) if isinstance(result, LogitsError)} == BROKEN
    for number, result in enumerate(broken):
        assert number in BROKEN or result == wanted[number]


@pytest.mark.parametrize("method", ["speculative", "sequence"])
def test_a_file_is_decoded_up_to_the_text_that_fails(method):
    """And the sentence names the input."""
    settings = Settings(method=method, alpha=0.0, block_size=2)  # a sequence cascade rewrites every text
    outputs = damaged().generate(TEXTS, settings, batch_size=4)
    wanted = list(sound().generate(TEXTS[:2], settings, batch_size=4))
    assert [next(outputs), next(outputs)] == wanted
    with pytest.raises(ValueError, match="input 2"):
        next(outputs)


def test_a_stream_that_is_not_numbers_raises():
    with pytest.raises(LogitsError):
        list(damaged().stream("201", Settings(method="speculative")))
