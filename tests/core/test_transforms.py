"""What temperature and truncations make of logits, by hand and against the oracle in float64."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from toys import transform

from speccascade_jax.core.transforms import SamplingOptions, largest, token_probs

LOGITS = 2 * np.random.default_rng(0).normal(size=(6, 12)).astype(np.float32)
VALUES = {"temperature": (0.0, 0.6, 1.0, 2.5), "top_k": (None, 3, 12), "top_p": (None, 0.2, 0.9),
          "min_p": (None, 0.1)}


def test_by_hand():
    half = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
    np.testing.assert_allclose(token_probs(half, SamplingOptions(1.0, top_p=0.7)), [2 / 3, 1 / 3, 0, 0],
                               atol=1e-6)


def test_every_combination_is_the_oracles():
    """Temperature, then top-k, top-p and min-p, renormalised after each."""
    laws = np.exp(LOGITS.astype(np.float64))
    laws /= laws.sum(-1, keepdims=True)
    for temperature, top_k, top_p, min_p in itertools.product(*VALUES.values()):
        options = SamplingOptions(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        expected = [transform(law, temperature, top_k, top_p, min_p) for law in laws]
        np.testing.assert_allclose(token_probs(jnp.asarray(LOGITS), options), expected, atol=1e-5)


def test_rows_have_options_of_their_own():
    """Also where a row's value leaves every token in."""
    rows = {"temperature": [1.0, 0.0, 0.5, 2.0, 1.0, 1.0], "top_k": [0, 2, 3, 0, 0, 0],
            "top_p": [1.0, 1.0, 0.8, 1.0, 0.5, 1.0], "min_p": [0.0, 0.0, 0.0, 0.2, 0.0, 0.0]}
    arrays = {field: np.array(values, np.int32 if field == "top_k" else np.float32)
              for field, values in rows.items()}
    together = token_probs(jnp.asarray(LOGITS), SamplingOptions(**arrays).of_rows(len(LOGITS)))
    for n, (temperature, top_k, top_p, min_p) in enumerate(zip(*rows.values(), strict=True)):
        alone = SamplingOptions(temperature, top_k=top_k or None, top_p=top_p if top_p < 1 else None,
                                min_p=min_p or None)
        np.testing.assert_allclose(together[n], token_probs(jnp.asarray(LOGITS[n]), alone), atol=1e-6)


def test_top_k_and_top_p_break_ties_by_id():
    flat = jnp.zeros(5)
    np.testing.assert_allclose(token_probs(flat, SamplingOptions(1.0, top_k=2)), [0.5, 0.5, 0, 0, 0])
    np.testing.assert_allclose(token_probs(flat, SamplingOptions(1.0, top_p=0.5)), [1 / 3] * 3 + [0, 0],
                               atol=1e-6)
    np.testing.assert_allclose(token_probs(flat, SamplingOptions(1.0, top_p=1.0)), [0.2] * 5, atol=1e-6)
    np.testing.assert_allclose(token_probs(flat, SamplingOptions(0.0)), [1, 0, 0, 0, 0])


@pytest.mark.parametrize("flatness", [0.2, 1.0, 5.0])
def test_the_largest_are_those_that_a_sort_finds(flatness):
    """Of 3,000, many of them equal, with a mass or a number of each row's own."""
    rng = np.random.default_rng(0)
    logits = np.round(rng.normal(size=(4, 3, 3000)) / flatness, 1)
    probs = np.asarray(token_probs(jnp.asarray(logits), SamplingOptions(1.0)))
    order = np.argsort(-probs, axis=-1, kind="stable")
    descending = np.take_along_axis(probs, order, axis=-1).astype(np.float64)
    before, place = np.cumsum(descending, axis=-1) - descending, np.arange(3000)
    for weights, enough, ranked in (
            (probs, np.array([0.11, 0.5, 0.93, 0.999]), before),
            (1, np.array([1, 7, 300, 2999]), place)):
        inside = np.zeros(probs.shape, bool)
        enough = enough[:, None, None]
        np.put_along_axis(inside, order, np.broadcast_to(ranked < enough, inside.shape), axis=-1)
        found = largest(jnp.asarray(probs), weights, enough)
        np.testing.assert_array_equal(found, inside)
