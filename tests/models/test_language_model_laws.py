"""The laws of the LanguageModel protocol, for every model."""

import dataclasses

import numpy as np
import pytest
from shapes import LENGTH, SOURCE, TARGET, TINY_GEMMA, TINY_T5
from tiny_models import in_blocks, prefilled

from speccascade_jax.models import model_of

SHAPES = {"t5": TINY_T5, "t5, a table a layer": dataclasses.replace(TINY_T5, shared_position_bias=False),
          "gemma": TINY_GEMMA}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def tiny(request):
    model = model_of(request.param)
    params = model.init(0)
    if request.param is not TINY_GEMMA:
        for name in ("encoder_bias", "decoder_bias"):  # far from zero: a table that is missed shows
            params[name] = params[name].replace(10 * params[name][...])
    return model, params


def test_append_and_chunk(tiny):
    model, params = tiny
    start = prefilled(model, params)
    whole, cache = in_blocks(model, params, TARGET, [30], start)
    assert (cache.length - start.length).tolist() == [30, 30, 30]
    parts, cache = in_blocks(model, params, TARGET, [1, 11, 18], start)
    assert (cache.length - start.length).tolist() == [30, 30, 30]
    np.testing.assert_allclose(parts, whole, atol=1e-5)


def test_rollback_with_ragged_lengths(tiny):
    model, params = tiny
    start = prefilled(model, params)
    _, cache = in_blocks(model, params, TARGET, [20], start)
    kept = np.array([3, 20, 11], np.int32)
    new = TARGET[:, ::-1][:, :6]
    rolled, _ = in_blocks(model, params, new, [2, 4], cache._replace(length=start.length + kept))
    for row, length in enumerate(kept):
        tokens = np.concatenate([TARGET[:, :length], new], axis=1)
        fresh, _ = in_blocks(model, params, tokens, [tokens.shape[1]], start)
        np.testing.assert_allclose(rolled[row], fresh[row, length:], atol=1e-5)


def test_rows_are_independent(tiny):
    model, params = tiny
    together, _ = in_blocks(model, params, TARGET, [10, 20], prefilled(model, params))
    for row in range(3):
        _, cache = model.prefill(params, SOURCE[row:row + 1], LENGTH[row:row + 1], 64)
        alone, _ = in_blocks(model, params, TARGET[row:row + 1], [10, 20], cache)
        np.testing.assert_allclose(together[row], alone[0], atol=1e-5)


def test_padding_does_not_matter(tiny):
    model, params = tiny
    _, cache = model.prefill(params, SOURCE[:, :13], np.minimum(LENGTH, 13), 64)
    short, _ = in_blocks(model, params, TARGET, [30], cache)
    long, _ = in_blocks(model, params, TARGET, [30], prefilled(model, params))
    np.testing.assert_allclose(short[1:], long[1:], atol=1e-5)
