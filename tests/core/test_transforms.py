"""Temperature and truncations, checked by hand and against the float64 oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recomputation import recomputed
from toys import CUTS, transform

from speccascade_jax.core.transforms import FEW, TRUNCATIONS, SamplingOptions, largest, nucleus, token_probs

LOGITS = 2 * np.random.default_rng(0).normal(size=(6, 12)).astype(np.float32)
TEMPERATURES = 0.0, 0.6, 1.0, 2.5


def test_the_oracle_knows_every_truncation():
    """The oracle of the law tests covers every entry of the table."""
    assert CUTS.keys() == TRUNCATIONS.keys()
    with pytest.raises(ValueError):
        transform(np.full(4, 0.25), 1.0, unknown=0.5)
    for name, (_, value) in CUTS.items():
        TRUNCATIONS[name].check(name, value)
        for law in np.exp(LOGITS.astype(np.float64)):
            kept = transform(law / law.sum(), 1.0, **{name: value}) > 0
            assert 0 < kept.sum() < len(kept)  # so that a test with this value tells something


def test_by_hand():
    half = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
    np.testing.assert_allclose(
        token_probs(half, SamplingOptions(1.0, top_p=0.7)), [2 / 3, 1 / 3, 0, 0], atol=1e-6
    )


def test_every_combination_is_the_oracles():
    """Temperature, then the truncations in their order, renormalised after each."""
    laws = np.exp(LOGITS.astype(np.float64))
    laws /= laws.sum(-1, keepdims=True)
    choices = [(None, value) for _, value in CUTS.values()]
    for temperature, *values in itertools.product(TEMPERATURES, *choices):
        asked = {name: value for name, value in zip(CUTS, values, strict=True) if value is not None}
        expected = [transform(law, temperature, **asked) for law in laws]
        np.testing.assert_allclose(
            token_probs(jnp.asarray(LOGITS), SamplingOptions(temperature, **asked)), expected, atol=1e-5
        )


def test_rows_have_their_own_options():
    """Row n has the n-th truncation's value, and of the others what leaves every token in."""
    rows = len(LOGITS)
    temperature = np.array([1.0, 0.0, 0.5, 2.0, 1.0, 1.0], np.float32)
    columns = {
        name: np.where(np.arange(rows) % (len(CUTS) + 1) == n, CUTS[name][1], truncation.off).astype(
            truncation.dtype
        )
        for n, (name, truncation) in enumerate(TRUNCATIONS.items())
    }
    together = token_probs(jnp.asarray(LOGITS), SamplingOptions(temperature, **columns).of_rows(rows))
    for n in range(rows):
        values = {
            name: column[n].item() for name, column in columns.items() if column[n] != TRUNCATIONS[name].off
        }
        alone = token_probs(jnp.asarray(LOGITS[n]), SamplingOptions(float(temperature[n]), **values))
        np.testing.assert_allclose(together[n], alone, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-46, 1e-40, 1e-37, 1.0, 3e38])
def test_no_temperature_makes_nan(temperature):
    """For any float32 temperature, next to a token that can never be drawn."""
    logits = jnp.array([[30.0, 10.0, -jnp.inf, 29.0]])
    for probs in (
        token_probs(logits, SamplingOptions(temperature)),
        jax.jit(token_probs)(logits, SamplingOptions(jnp.float32(temperature))),
    ):
        assert probs[0, 2] == 0 and probs.sum() == pytest.approx(1.0)
        assert (probs[0, 0] == 1) == (temperature < 1)


@pytest.mark.parametrize("mass", [1e-46, 1e-40, 1e-30])
def test_a_mass_that_underflows_keeps_the_likeliest_token(mass):
    logits = jnp.array([[1.0, 3.0, 2.0]])
    for value in (mass, jnp.float32(mass)):
        probs = jax.jit(token_probs)(logits, SamplingOptions(1.0, top_p=value))
        np.testing.assert_allclose(probs, [[0, 1, 0]], atol=1e-6)


@pytest.mark.parametrize("truncation", [{"top_p": 0.3}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_a_truncation_keeps_a_token_however_probabilities_are_rounded_anew(truncation):
    """On a GPU, no entry of one copy of the probabilities reached the threshold found in another copy."""
    options = SamplingOptions(1.0, **truncation)
    expected = token_probs(jnp.asarray(LOGITS), options)
    for seed in range(4):
        probs = recomputed(lambda x: token_probs(x, options), LOGITS, seed=seed)
        np.testing.assert_allclose(probs, expected, atol=1e-5)


def test_the_most_likely_tokens_are_kept_however_probabilities_are_rounded_anew(monkeypatch):
    """Off CPUs, top-k finds its threshold in probabilities, too."""

    def off_cpus(*arguments, default, **others):
        return default(*arguments)

    monkeypatch.setattr("jax.lax.platform_dependent", off_cpus)
    options = SamplingOptions(1.0, top_k=1)
    for seed in range(4):
        probs = recomputed(lambda x: token_probs(x, options), LOGITS, seed=seed)
        np.testing.assert_allclose(probs, np.eye(12)[LOGITS.argmax(-1)], atol=1e-5)


def test_top_k_and_top_p_break_ties_by_id():
    flat = jnp.zeros(5)
    np.testing.assert_allclose(token_probs(flat, SamplingOptions(1.0, top_k=2)), [0.5, 0.5, 0, 0, 0])
    np.testing.assert_allclose(
        token_probs(flat, SamplingOptions(1.0, top_p=0.5)), [1 / 3] * 3 + [0, 0], atol=1e-6
    )
    np.testing.assert_allclose(token_probs(flat, SamplingOptions(1.0, top_p=1.0)), [0.2] * 5, atol=1e-6)
    np.testing.assert_allclose(token_probs(flat, SamplingOptions(0.0)), [1, 0, 0, 0, 0])


@pytest.mark.parametrize("size", [5, 3000])
def test_a_nucleus_is_the_smallest_set_of_its_mass(size):
    """With ties, in rows whose nuclei have few tokens, many or all."""
    rng = np.random.default_rng(1)
    logits = np.round(
        rng.normal(size=(6, 3, size)) * np.array([[[9.0]], [[5]], [[2]], [[0.5]], [[9]], [[1]]]), 1
    )
    probs = np.asarray(token_probs(jnp.asarray(logits), SamplingOptions(1.0)))
    mass = np.array([0.3, 0.9, 0.5, 0.97, 1.0, 1e-9])[:, None, None]
    order = np.argsort(-probs, axis=-1, kind="stable")
    descending = np.take_along_axis(probs, order, axis=-1).astype(np.float64)
    before = np.cumsum(descending, axis=-1) - descending
    inside = np.zeros(probs.shape, bool)
    np.put_along_axis(inside, order, (before < mass) | (mass == 1), axis=-1)
    np.testing.assert_array_equal(nucleus(jnp.asarray(probs), mass, None), inside)
    for row in range(len(probs)):  # whatever the other rows need
        np.testing.assert_array_equal(nucleus(jnp.asarray(probs[row]), mass[row], None), inside[row])
    if size > FEW:
        counts = inside.sum(-1)
        assert (
            counts.min() == 1
            and ((counts > 1) & (counts < FEW)).any()
            and ((counts > FEW) & (counts < size)).any()
        )


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
        (1, np.array([1, 7, 300, 2999]), place),
    ):
        inside = np.zeros(probs.shape, bool)
        enough = enough[:, None, None]
        np.put_along_axis(inside, order, np.broadcast_to(ranked < enough, inside.shape), axis=-1)
        mask = largest(jnp.asarray(probs), weights, enough)
        np.testing.assert_array_equal(mask, inside)
