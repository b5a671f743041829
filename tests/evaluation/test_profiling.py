"""The timing of parts and of whole decodings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import prefill
from toys import TableLM, table

from speccascade_jax.core import loop
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.evaluation import profiling
from speccascade_jax.evaluation.profiling import FixedLogits, in_turn, round_part, slope


def begun(method, small, large, params, block_size=3):
    """A sampler, and two rows after their prompts."""
    sampler = Speculative(Autoregressive(small), large, METHODS[method], block_size)
    asked = loop.requests(
        sampler,
        jax.random.split(jax.random.key(0), 2),
        np.array([[1, 2], [2, 1]]),
        np.array([2, 2]),
        SamplingOptions(1.0),
        [0.2],
        None,
        None,
        12,
    )
    return sampler, jax.jit(lambda p: loop.begin(sampler, p, asked, max_new_tokens=12))(params)


@pytest.mark.parametrize("method", ["speculative", "token_v3"])
def test_a_round_is_repeated_at_one_position(method):
    """The caches, the position and the room do not change, so every repetition costs the same."""
    model, params = TableLM(4), (table(1, 4), table(2, 4))
    sampler, state = begun(method, model, model, params)
    part, arguments = round_part(sampler, params, state)
    for times in (1, 5):
        after = jax.jit(part)(np.int32(times), *arguments)
        np.testing.assert_array_equal(after.rows.start, state.rows.start)
        np.testing.assert_array_equal(after.rows.room, state.rows.room)
        for cache, before in zip(after.caches, state.caches, strict=True):
            np.testing.assert_array_equal(cache.length, before.length)
        assert (np.asarray(after.counts[1].rounds) == times).all()


def test_a_model_that_computes_nothing_obeys_the_laws_of_models():
    model, params = FixedLogits(5), np.random.default_rng(0).normal(size=(30, 5)).astype(np.float32)
    prefix, cache = prefill(model, params, jnp.ones((2, 3), jnp.int32), jnp.array([3, 2]), 20)
    assert prefix.tokens.shape == (2, 1)
    tokens = jnp.array([[1, 2, 3, 4], [2, 2, 0, 1]])
    _, longer = jax.jit(model.extend)(params, tokens, cache)
    np.testing.assert_array_equal(longer.length, cache.length + 4)
    np.testing.assert_array_equal(model.roll_back(longer, cache.length).length, cache.length)
    back = model.roll_back(longer, cache.length + 1)
    _, next_cache = jax.jit(model.extend)(params, tokens[:, :1], cache)
    np.testing.assert_array_equal(
        jax.jit(model.extend)(params, tokens[:, 1:], back)[0],
        jax.jit(model.extend)(params, tokens[:, 1:], next_cache)[0],
    )
    sampler, state = begun("token_v3", model, model, (params, params))
    after = loop.run(sampler, (params, params), state, 2, eos_id=-1)
    assert (np.asarray(after.emitted) == 12).all()


@pytest.mark.full
def test_every_part_takes_time():
    model, params = TableLM(4), (table(1, 4), table(2, 4))
    timings = profiling.measure(
        model,
        model,
        params,
        METHODS["speculative"],
        block_size=2,
        batch_size=2,
        source_length=4,
        max_new_tokens=8,
        alpha=0.0,
        temperature=1.0,
        repetitions=2,
    )
    assert set(timings) == {
        "drafter prefill",
        "verifier prefill",
        "drafter step",
        "verifier step",
        profiling.scoring(2),
        profiling.OVERHEAD,
        "round",
    }
    for timing in timings.values():
        assert timing.low <= timing.median <= timing.high


def test_contestants_take_turns_to_go_first():
    order = []

    def contestant(name):
        def decode(index, text):
            order.append(name)
            return 0.0, None

        return decode

    runs = in_turn({name: contestant(name) for name in "abc"}, ["x"] * 6)
    assert [order[n] for n in range(0, 18, 3)] == list("abcabc")
    assert {name: len(results) for name, results in runs.items()} == dict.fromkeys("abc", 6)


def test_a_step_excludes_the_prefill():
    counts, widths = [3, 9, 4, 7, 12], [16, 32, 16, 48, 32]
    seconds = [0.25 * n + 0.01 * width + 2 for n, width in zip(counts, widths, strict=True)]
    assert slope(counts, widths, seconds) == pytest.approx(0.25)
