"""Files whose texts share prefixes have the same outputs with and without the cache."""

from collections import Counter

import pytest
from digests import Digest, logits
from served_toys import Digits

from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference.text import Cascade
from speccascade_jax.scheduling import prompts
from speccascade_jax.scheduling.programs import Programs

CHUNK = 4
SHOTS = "01201202101221"
TEXTS = [SHOTS + "02"[n % 2] + "012"[n % 3] * (n % 4 + 1) for n in range(9)]


@pytest.fixture(scope="module")
def make():
    """A cascade with a cache of so many bytes; all of them share their programs."""
    large = logits(0, 4)
    models, params = (Digest(4), Digest(4)), (logits(1, 4, large), large)
    programs = {}

    def made(bytes_, prefix=""):
        cascade = Cascade(
            models,
            params,
            Digits(),
            prefix=prefix,
            max_source_length=24,
            max_new_tokens=3,
            prefix_cache_bytes=bytes_,
        )
        cascade.models, cascade.params, cascade.programs = models, params, programs
        return cascade

    return made


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(prompts, "CHUNK", CHUNK)
    monkeypatch.setattr(prompts, "WORTH", 1)


@pytest.fixture
def called(monkeypatch):
    """The names of the programs that run."""
    names, real = [], Programs.call

    def call(self, program, *rest):
        names.append(next(key[0] for key, executable in self.compiled.items() if executable is program))
        return real(self, program, *rest)

    monkeypatch.setattr(Programs, "call", call)
    return names


def outputs(cascade, texts, batch_size, **options):
    return list(
        cascade.generate(texts, method="opt", temperature=1.0, block_size=2, batch_size=batch_size, **options)
    )


@pytest.mark.full(quick=["3"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_outputs_are_those_without_the_cache(batch_size, make, small_chunks, called):
    plain = outputs(make(0), TEXTS, batch_size)
    assert "read" not in called
    cascade = make(10**6)
    blocks = len(SHOTS) // CHUNK
    assert outputs(cascade, TEXTS, batch_size) == plain
    ends = Counter(
        tuple(row[:end]) for row in cascade.encode(TEXTS)[0] for end in range(CHUNK, len(row), CHUNK)
    )
    once = sum(count > 1 for count in ends.values())  # of all texts, or of two
    assert called.count("cut") == once if batch_size > 1 else blocks <= called.count("cut") <= once
    called.clear()
    assert outputs(make(10**6), TEXTS[:1], batch_size, beginnings=[SHOTS]) == plain[:1]
    assert called.count("cut") == blocks  # from the first text on
    called.clear()
    assert outputs(make(10**6), TEXTS[:1], batch_size, beginnings=["", "2"]) == plain[:1]
    assert "cut" not in called


@pytest.mark.full
def test_methods_share_the_prefix_cache(make, small_chunks, called):
    plain, cascade = make(0), make(10**6)
    for number, method in enumerate(("opt", "verifier", "drafter")):
        expected = list(plain.generate(TEXTS, method=method, temperature=1.0, batch_size=3))
        called.clear()
        assert list(cascade.generate(TEXTS, method=method, temperature=1.0, batch_size=3)) == expected
        assert bool(called.count("cut")) == (number == 0) and called.count("put")


@pytest.mark.full
def test_another_instruction_finds_nothing(make, small_chunks, called):
    """The texts are the same, but their prefix differs."""
    bodies = ["0120120" + "012"[n % 3] for n in range(6)]
    cascade = make(10**6)
    for prefix in ("2101", "1210", "2101"):
        cascade.prefix = prefix
        assert outputs(cascade, bodies, 3) == outputs(make(0, prefix), bodies, 3)


def test_a_file_whose_texts_repeat_little_is_read_as_a_whole(make, called, monkeypatch):
    monkeypatch.setattr(prompts, "CHUNK", CHUNK)
    cascade = make(10**6)
    outputs(cascade, TEXTS, 3)
    assert "read" not in called and cascade.prefixes.repeated > 0
    while "read" not in called:  # the more often, the sooner it is worth it
        assert cascade.prefixes.repeated < prompts.WORTH
        outputs(cascade, TEXTS, 3)


@pytest.mark.parametrize("value", [-1, 2**63])
def test_the_bytes_are_checked(value):
    config = DecodeConfig(drafter="a", verifier="b", prefix_cache_bytes=value)
    with pytest.raises(FieldError) as error:
        config.check()
    assert (error.value.field, error.value.value) == ("prefix_cache_bytes", value)
