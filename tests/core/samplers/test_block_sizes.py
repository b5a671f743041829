"""Rounds of one decoding that differ in their block size: each text follows its law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import EOS, FAIL_BELOW, FAMILIES, PROMPTS, STEPS, TABLES, VOCAB, oracle
from toys import TableBlock, TableLM, chi_square, sequence_law

from speccascade_jax.core import loop
from speccascade_jax.core.nests import covered
from speccascade_jax.core.randomness import Role
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.samplers.adaptive import Adaptive
from speccascade_jax.core.samplers.block import Parallel
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.core.verification import VERIFICATIONS

SIZES = (0, 1, 3)
MODEL = TableLM(VOCAB)
PARAMS = tuple(map(jnp.asarray, TABLES[:2]))
PROMPT = PROMPTS[1]


def test_only_a_model_that_drafts_token_by_token_resizes():
    """And only where nothing else decides how long a draft is."""
    network = TableBlock(VOCAB)
    at_once = Parallel(network.members[0], 4)
    rule, alone = METHODS["speculative"], Autoregressive(MODEL)
    pair = Speculative(alone, MODEL, rule, 3)
    assert pair.resizes and pair.of_blocks(0).width == 1
    others = (
        Adaptive(alone, MODEL, rule, 3),
        Speculative(at_once, network.members[1], rule, 3),
        Speculative(pair, MODEL, rule, 3),
    )
    assert not any(sampler.resizes for sampler in others)


def by_the_past(state, sampler):
    """A size for each row, of how many tokens it has accepted and rejected."""
    counts = state.counts[1]
    return (counts.accepted + 2 * counts.rounds) % len(SIZES)


def peeking(state, sampler):
    """The planted bug: a size that knows the random number with which the next token will be drafted."""
    return jnp.where(state.rows.noise.at(state.rows.start, 0, Role.DRAW, 1, False)[:, 0] < 0.5, 0, 2)


def texts(method, verification, rows, choose):
    """Tokens [rows, STEPS] of rows that each choose the size of their next round."""
    sampler = Speculative(
        Autoregressive(MODEL), MODEL, METHODS[method], max(SIZES), verification=VERIFICATIONS[verification]
    )
    batch = loop.requests(
        sampler,
        jax.random.split(jax.random.key(5), rows),
        np.tile(np.array(PROMPT, np.int32), (rows, 1)),
        np.full(rows, len(PROMPT), np.int32),
        SamplingOptions(1.0),
        [FAMILIES[method]],
        None,
        None,
        STEPS,
    )

    def turn(state):
        """A round of every size, of which each row keeps the one it chose."""
        chosen = choose(state, sampler)
        later = [
            loop.advance(
                sampler.of_blocks(size),
                PARAMS,
                loop.caught_up(sampler, PARAMS, state) if size else state,
                eos_id=EOS,
            )
            for size in SIZES
        ]
        return jax.tree.map(
            lambda *each: jnp.select(
                [(chosen == n).reshape(-1, *[1] * (each[0].ndim - 1)) for n in range(len(SIZES))], each
            ),
            *later,
        )

    @jax.jit
    def run(batch):
        state = loop.begin(sampler, PARAMS, batch, max_new_tokens=STEPS, eos_id=EOS)
        state = jax.lax.fori_loop(0, STEPS, lambda _, state: turn(state), state)
        return loop.finish(state, STEPS).tokens, state

    tokens, state = run(batch)
    assert not np.asarray(state.rows.room).any()
    return np.asarray(tokens), state


def p_value(method, verification, rows, choose):
    tokens, _ = texts(method, verification, rows, choose)
    law = sequence_law(TABLES[:2], [oracle(method)], [FAMILIES[method]], PROMPT, steps=STEPS, eos=EOS)
    return chi_square(tokens, law)


@pytest.mark.parametrize(
    "method,verification",
    [
        ("speculative", "token"),
        pytest.param("speculative", "block", marks=pytest.mark.full),
        pytest.param("opt", "token", marks=pytest.mark.full),
        pytest.param("token_v3", "block", marks=pytest.mark.full),
    ],
)
def test_texts_follow_their_law(method, verification, rows):
    assert 4 * p_value(method, verification, rows, by_the_past) > FAIL_BELOW


@pytest.mark.full
def test_a_size_that_knows_what_is_drafted_next_is_detected(rows):
    assert p_value("opt", "token", rows, peeking) < FAIL_BELOW


@pytest.mark.full
def test_the_drafter_reads_all_that_was_written_without_it():
    """After rounds of no drafts its cache lacks their tokens, and then covers all but the last."""
    tokens, state = texts("speculative", "token", 64, lambda state, sampler: state.rows.start * 0)
    sampler = Speculative(Autoregressive(MODEL), MODEL, METHODS["speculative"], max(SIZES))
    assert (np.asarray(covered(MODEL, state.caches[0])) == len(PROMPT) - 1).all()
    drafter = loop.caught_up(sampler, PARAMS, state).caches[0]
    end = len(PROMPT) - 1 + np.asarray(state.emitted)
    assert (np.asarray(drafter.length) == end).all()
    for row, last in enumerate(end):
        text = [*PROMPT, *tokens[row][: state.emitted[row]]]
        assert np.asarray(drafter.tokens)[row, :last].tolist() == text[:-1]
