"""Planted bugs in the baselines, which the law tests must detect."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TableLM, chi_square, sequence_law, table

from speccascade_jax.baselines import oracle, token_cascade
from speccascade_jax.baselines.oracle import Oracle
from speccascade_jax.baselines.token_cascade import TokenCascade
from speccascade_jax.core.loop import generate
from speccascade_jax.core.samplers import Autoregressive
from speccascade_jax.core.transforms import SamplingOptions

VOCAB, EOS, STEPS = 4, 3, 5
FAIL_BELOW = 1e-4
TABLES = table(39, VOCAB), table(40, VOCAB)
MODEL = TableLM(VOCAB)


def texts(sampler, alpha, rows, temperature, limits=None):
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(7), jnp.arange(rows))
    ones = np.ones((rows, 1), np.int32)
    return np.asarray(
        generate(
            sampler,
            TABLES,
            keys,
            ones,
            ones[:, 0],
            SamplingOptions(temperature),
            jnp.array([alpha]),
            max_new_tokens=STEPS,
            eos_id=EOS,
            limits=limits,
        ).tokens
    )


def reads_sampled_distributions(monkeypatch):
    """The oracle's rule reads q~ and p~ in place of q and p."""
    scores = oracle.Scores
    monkeypatch.setattr(
        oracle,
        "Scores",
        lambda q, p, q_sampled, p_sampled, greedy: scores(q_sampled, p_sampled, q_sampled, p_sampled, greedy),
    )


def ignores_its_room(monkeypatch):
    """The token cascade's drafter writes past the row's limit."""
    draft = token_cascade.draft_while_confident

    def wrong(drafter, params, cache, rows, *rest):
        return draft(drafter, params, cache, rows._replace(room=jnp.where(rows.room > 0, STEPS, 0)), *rest)

    monkeypatch.setattr(token_cascade, "draft_while_confident", wrong)


@pytest.mark.full
def test_the_oracle_reads_the_models_own_distributions(monkeypatch, rows):
    """At a temperature at which they differ from the distributions that it samples from."""
    law = sequence_law(TABLES, ["diff"], [0.06], (1,), steps=STEPS, eos=EOS, temperature=0.5)
    assert chi_square(texts(Oracle(MODEL, MODEL), 0.06, rows, 0.5), law) > FAIL_BELOW
    jax.clear_caches()
    with monkeypatch.context() as patch:
        reads_sampled_distributions(patch)
        assert chi_square(texts(Oracle(MODEL, MODEL), 0.06, rows, 0.5), law) < FAIL_BELOW
    jax.clear_caches()


@pytest.mark.full
def test_a_token_cascade_ends_at_each_rows_limit(monkeypatch):
    sampler, limits = TokenCascade(Autoregressive(MODEL), MODEL, 2), np.arange(256) % (STEPS + 1)
    longest = texts(sampler, 0.6, 256, 1.0)
    expected = np.where(np.arange(STEPS) < limits[:, None], longest, -1)
    np.testing.assert_array_equal(texts(sampler, 0.6, 256, 1.0, limits), expected)
    jax.clear_caches()
    with monkeypatch.context() as patch:
        ignores_its_room(patch)
        with pytest.raises(AssertionError):
            np.testing.assert_array_equal(texts(sampler, 0.6, 256, 1.0, limits), expected)
    jax.clear_caches()
