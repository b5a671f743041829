"""Drafts verified as a whole in the compiled loop: laws at each level, rows that differ, planted mistakes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import (
    BLOCK_TABLES,
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
    p_values,
    quick,
    unlikely,
)
from toys import TableLM, chi_square, sequence_law

from speccascade_jax.core import loop
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Adaptive, Autoregressive, Speculative
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.core.verification import BLOCK, TOKEN

MODEL = TableLM(VOCAB)
PLAIN = SamplingOptions(temperature=1.0)


def unweighted(u, draft, pi):
    """The residual is that of pi itself."""
    number, weights = BLOCK.accept(u, draft, pi)
    return number, jnp.ones_like(weights)


WAYS = {
    "token": TOKEN,
    "block": BLOCK,
    "numbers of positions": dataclasses.replace(BLOCK, by_round=False),
    "no weights": dataclasses.replace(BLOCK, accept=unweighted),
}
"""The last two are mistakes. Of a position drawn again, the number has decided how much was rolled back."""
UNLIKE = Speculative(
    Autoregressive(MODEL),
    MODEL,
    tuple(METHODS[name] for name in FAMILIES),
    3,
    verification=tuple(WAYS.values()),
)


def in_one_program(method, way, rows, temperature=1.0):
    """decoded() by one of FAMILIES and one of WAYS, or each row's number of one; all of it is traced."""
    ways = np.full(rows, list(WAYS).index(way)) if isinstance(way, str) else way
    return decoded(
        UNLIKE,
        tuple(BLOCK_TABLES),
        rows,
        SamplingOptions(np.full(rows, temperature, np.float32)),
        np.full((rows, 1), FAMILIES[method]),
        methods=np.full((rows, 1), list(FAMILIES).index(method)),
        verifications=ways,
    )


def chance_of(output, method):
    """p_value() of what in_one_program() returns."""
    result, which = output
    laws = [
        sequence_law(BLOCK_TABLES, [method], [FAMILIES[method]], prompt, steps=STEPS, eos=EOS)
        for prompt in PROMPTS
    ]
    return 2 * min(chi_square(np.asarray(result.tokens)[which == n], law) for n, law in enumerate(laws))


@pytest.mark.full
def test_the_law_of_three_families_in_one_program(rows):
    """And mistakes that it must see. As a block fewer rounds are needed; at temperature 0 both ways write the
    same."""
    outputs = {method: in_one_program(method, "block", rows) for method in FAMILIES}
    programs = loop.generate._cache_size()
    for method, texts in outputs.items():
        assert chance_of(texts, method) > FAIL_BELOW
    by_token = in_one_program("speculative", "token", rows)[0]
    assert outputs["speculative"][0].counts[1].rounds.sum() < 0.995 * by_token.counts[1].rounds.sum()
    for mistake in list(WAYS)[2:]:
        assert chance_of(in_one_program("speculative", mistake, rows), "speculative") < FAIL_BELOW
    ways = np.arange(rows) // len(PROMPTS) % 2
    greedy = in_one_program("token_v3", ways, rows, temperature=0.0)[0]
    for leaf in jax.tree.leaves(greedy):
        half, other = (np.asarray(leaf)[ways == n] for n in range(2))
        np.testing.assert_array_equal(half, other)
    assert loop.generate._cache_size() == programs


@pytest.mark.long
@pytest.mark.full
def test_the_law_with_truncations():
    options = {"rows": 200_000, "verification": BLOCK, "top_k": 3, "temperature": 0.5}
    assert p_value(["token_v3"], [FAMILIES["token_v3"]], [3], **options) > FAIL_BELOW


@pytest.mark.long
@pytest.mark.full
@pytest.mark.parametrize("hand_over", HAND_OVERS)
def test_the_law_of_hierarchies(hand_over):
    methods, settings = [("opt", "speculative"), ("token_v3", "speculative")], [(("opt", "token_v3"), {})]
    if hand_over == "keep":
        settings.append((("speculative", "speculative"), {}))
    options = {"rows": 200_000, "hand_over": hand_over, "verification": BLOCK}
    assert not unlikely(p_values(methods, [2, 2], settings, **options))


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


@pytest.fixture
def fresh_programs():
    jax.clear_caches()
    yield
    jax.clear_caches()


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
