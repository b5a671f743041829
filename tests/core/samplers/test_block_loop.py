"""Drafts verified as a whole in the compiled loop: laws at each level, rows that differ, planted mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import (
    EOS,
    FAIL_BELOW,
    FAMILIES,
    HAND_OVERS,
    PROMPTS,
    STEPS,
    TABLES,
    VOCAB,
    decoded,
    p_value,
    quick,
)
from toys import TableLM, chi_square, sequence_law

from speccascade_jax.core import loop
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Adaptive, Autoregressive, Speculative
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.core.verification import BLOCK, TOKEN

MODEL = TableLM(VOCAB)
PLAIN = SamplingOptions(temperature=1.0)


@pytest.mark.parametrize(
    "method,size",
    quick(
        *((m, 3) for m in FAMILIES), ("opt", 1), ("speculative", 6), among=[("opt", 1), ("speculative", 6)]
    ),
)
def test_the_law(method, size, rows):
    """Three families of rules; blocks longer than the texts, too."""
    options = {"rows": rows, "verification": BLOCK}
    assert p_value([method], [FAMILIES[method]], [size], **options) > FAIL_BELOW


@pytest.mark.long
@pytest.mark.full
def test_the_law_with_truncations():
    options = {"rows": 200_000, "verification": BLOCK, "top_k": 3, "temperature": 0.5}
    assert p_value(["token_v3"], [FAMILIES["token_v3"]], [3], **options) > FAIL_BELOW


@pytest.mark.long
@pytest.mark.parametrize(
    "hand_over,methods",
    quick(
        ("keep", ("speculative", "speculative")),
        *((hand_over, ("opt", "token_v3")) for hand_over in HAND_OVERS),
        among=[("keep", ("speculative", "speculative"))],
    ),
)
def test_the_law_of_hierarchies(hand_over, methods, full):
    options = {"rows": 200_000 if full else 60_000, "hand_over": hand_over, "verification": BLOCK}
    alphas = [FAMILIES[name] for name in methods]
    assert p_value(methods, alphas, [2, 2], **options) > FAIL_BELOW


@pytest.mark.long
@pytest.mark.full
def test_the_law_of_four_levels():
    methods = ["speculative", "opt", "speculative"]
    options = {"rows": 200_000, "verification": BLOCK}
    assert p_value(methods, [FAMILIES[m] for m in methods], [1, 2, 2], **options) > FAIL_BELOW


def adaptive(method, stop_below, verification):
    return Adaptive(
        Autoregressive(MODEL), MODEL, METHODS[method], 4, stop_below=stop_below, verification=verification
    )


@pytest.mark.parametrize("method", quick(*((m,) for m in FAMILIES), among=[("opt",)]))
def test_the_law_of_adaptive_blocks(method, rows):
    alpha = FAMILIES[method]
    result, which = decoded(adaptive(method, 0.3, BLOCK), (TABLES[0], TABLES[1]), rows, PLAIN, [alpha])
    tokens = np.asarray(result.tokens)
    values = [
        chi_square(
            tokens[which == n], sequence_law(TABLES[:2], [method], [alpha], prompt, steps=STEPS, eos=EOS)
        )
        for n, prompt in enumerate(PROMPTS)
    ]
    assert 2 * min(values) > FAIL_BELOW
    sizes = np.asarray(result.counts[1].drafted) / np.asarray(result.counts[1].rounds)
    assert len(np.unique(sizes)) > 3  # it does adapt


@pytest.mark.full(quick=["sizes1"])
@pytest.mark.parametrize("sizes", [(3,), (2, 2)])
def test_rows_that_differ_share_a_program_and_nothing_else(sizes):
    """Each row writes what it writes where all are verified as it is; one compilation."""
    rows, methods = 96, ["opt", "speculative"][-len(sizes) :]
    params = TABLES[0]
    for larger in TABLES[1 : len(sizes) + 1]:
        params = (params, larger)

    def written(verification, ways=None):
        sampler = loop_sampler(methods, sizes, verification)
        alphas = [FAMILIES[m] for m in methods]
        result, _ = decoded(sampler, params, rows, PLAIN, alphas, verifications=ways)
        return [np.asarray(x) for x in jax.tree.leaves(result)]

    ways = np.arange(rows) % 3 % 2
    both = written((TOKEN, BLOCK), ways)
    before = loop.generate._cache_size()
    for x, y in zip(both, written((TOKEN, BLOCK), 1 - ways), strict=True):
        assert x.shape == y.shape
    assert loop.generate._cache_size() == before
    for way, alone in enumerate((written(TOKEN), written(BLOCK))):
        for x, y in zip(both, alone, strict=True):
            np.testing.assert_array_equal(x[ways == way], y[ways == way])


def loop_sampler(methods, sizes, verification):
    sampler = Autoregressive(MODEL)
    for method, size in zip(methods, sizes, strict=True):
        sampler = Speculative(sampler, MODEL, METHODS[method], size, verification=verification)
    return sampler


def test_greedy_texts_are_those_of_verification_by_token():
    params = (TABLES[0], TABLES[1])
    texts = [
        decoded(loop_sampler(["token_v3"], (3,), way), params, 16, SamplingOptions(temperature=0.0), [0.4])[0]
        for way in (TOKEN, BLOCK)
    ]
    for x, y in zip(*map(jax.tree.leaves, texts), strict=True):
        np.testing.assert_array_equal(x, y)


def test_fewer_rounds_are_needed():
    """Of the same drafts and targets, at temperature 1."""
    by_token, by_block = (
        decoded(loop_sampler(["speculative"], (4,), way), (TABLES[0], TABLES[1]), 20_000, PLAIN, [0.0])[0]
        for way in (TOKEN, BLOCK)
    )
    assert by_block.counts[1].rounds.sum() < 0.995 * by_token.counts[1].rounds.sum()


@pytest.fixture
def fresh_programs():
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.long
def test_numbers_of_positions_are_seen(monkeypatch, fresh_programs):
    """A position drawn again meets the number that decided how much was rolled back."""
    monkeypatch.setattr(loop, "by_round", lambda sampler, ways: jnp.zeros(ways.shape, bool))
    assert p_value(["speculative"], [0.0], [2], rows=100_000, verification=BLOCK) < FAIL_BELOW


@pytest.mark.long
@pytest.mark.full
def test_numbers_of_a_round_without_those_around_it_are_seen(monkeypatch, fresh_programs):
    """In a hierarchy, a round within a round has the numbers of every other that began at its position."""
    noise = loop.noise

    def by_inner_start(keys, rounds, length, by_round):
        made, plain = noise(keys, rounds, length), noise(keys, [sizes[-1:] for sizes in rounds], length)

        def spread(number, sizes):
            if len(sizes) == 1:
                return made.levels[number]
            place = jnp.arange(length)[:, None] + jnp.arange(sizes[0])
            return jnp.take(plain.levels[number], place, axis=2, mode="clip")

        return made._replace(levels=tuple(spread(n, sizes) for n, sizes in enumerate(rounds)))

    monkeypatch.setattr(loop, "noise", by_inner_start)
    options = {"rows": 200_000, "hand_over": "keep", "verification": BLOCK}
    assert p_value(["speculative"] * 2, [0.0, 0.0], [2, 2], **options) < FAIL_BELOW


def test_a_sampler_that_hides_its_rounds_is_refused():
    """It would meet the numbers of positions."""

    class Hiding(Speculative):
        noise_sizes = ((), ())

    sampler = Hiding(Autoregressive(MODEL), MODEL, METHODS["speculative"], 3, verification=BLOCK)
    with pytest.raises(ValueError, match="level 1"):
        decoded(sampler, (TABLES[0], TABLES[1]), 4, PLAIN, [0.0])
