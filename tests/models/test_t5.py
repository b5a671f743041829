"""T5 against Hugging Face's, and its own layouts against each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from shapes import LENGTH, SOURCE, TARGET, TINY_T5, TINY_T5_1_0
from tiny_models import in_blocks, prefilled, transformers_t5

from speccascade_jax.checkpoints import huggingface
from speccascade_jax.checkpoints.arrays import Placement
from speccascade_jax.models.t5 import PRESETS, T5Model


@pytest.fixture(scope="module", params=[True, False], ids=["shared_table", "table_a_layer"])
def tiny(request):
    model = T5Model(dataclasses.replace(TINY_T5, shared_position_bias=request.param))
    params = model.init(0)
    for name in ("encoder_bias", "decoder_bias"):  # far from zero: a table that is missed shows
        params[name] = params[name].replace(10 * params[name][...])
    return model, params


@pytest.fixture(scope="module")
def shared():
    model = T5Model(TINY_T5)
    return model, model.init(0)


@pytest.mark.parametrize("config", [TINY_T5, TINY_T5_1_0], ids=["t5_1_1", "t5_1_0"])
def test_logits_agree_with_hugging_face(config, tmp_path):
    torch = pytest.importorskip("torch")
    theirs = transformers_t5(config)
    theirs.save_pretrained(tmp_path, safe_serialization=True)
    model, params = huggingface.load(tmp_path, Placement())
    assert model.config == config
    decoder_input = np.pad(TARGET[:, :-1], ((0, 0), (1, 0)))
    mask = np.arange(SOURCE.shape[1]) < LENGTH[:, None]
    with torch.no_grad():
        expected = theirs(
            input_ids=torch.tensor(SOURCE, dtype=torch.long),
            attention_mask=torch.tensor(mask, dtype=torch.long),
            decoder_input_ids=torch.tensor(decoder_input, dtype=torch.long),
        ).logits.numpy()
    assert np.ptp(expected) > 2  # weights large enough that a wrong scale or bias shows
    size = TARGET.shape[1]
    for sizes in ([size], [1] * size, [3, 7, 1, 6, 13]):
        logits, _ = in_blocks(model, params, decoder_input, sizes, prefilled(model, params))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.full(quick=["table_a_layer"])
def test_teacher_forcing_equals_decoding(tiny):
    model, params = tiny
    decoder_input = np.pad(TARGET[:, :-1], ((0, 0), (1, 0)))
    forced = model.forced(params, SOURCE, LENGTH, TARGET)
    stepped, _ = in_blocks(model, params, decoder_input, [5, 25], prefilled(model, params))
    np.testing.assert_allclose(forced, stepped, rtol=0, atol=1e-5)


@pytest.mark.full
def test_equal_tables_are_a_shared_table(shared):
    model, params = shared
    apart = T5Model(dataclasses.replace(TINY_T5, shared_position_bias=False))
    tables = apart.init(1)
    nnx.update(
        tables,
        nnx.from_flat_state(
            [
                (
                    path,
                    x.replace(jnp.stack([x[...]] * (3 if path == ("encoder_bias",) else 2)))
                    if path[0].endswith("_bias")
                    else x,
                )
                for path, x in nnx.to_flat_state(params)
            ]
        ),
    )
    for sizes in ([30], [5, 25]):
        expected, _ = in_blocks(model, params, TARGET, sizes, prefilled(model, params))
        logits, _ = in_blocks(apart, tables, TARGET, sizes, prefilled(apart, tables))
        np.testing.assert_array_equal(logits, expected)


@pytest.mark.full(quick=["steps-bfloat16"])
@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [[30], [1] * 30], ids=["block", "steps"])
def test_bfloat16_is_float32_rounded(shared, sizes, cache_dtype):
    """One row at a time too, which takes a path of its own."""
    model, params = shared
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    half = dataclasses.replace(model, dtype="bfloat16", cache_dtype=cache_dtype)
    _, cache = half.prefill(params, jnp.asarray(SOURCE[:1]), jnp.asarray(LENGTH[:1]), 40)
    assert cache.keys[0].dtype == cache.cross_values[0].dtype == cache_dtype
    logits, _ = in_blocks(half, params, TARGET[:1], sizes, cache)
    full = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    expected, _ = in_blocks(model, full, TARGET, [30], prefilled(model, full))
    np.testing.assert_allclose(logits, expected[:1], atol=0.1)
    assert np.abs(logits - expected[1:2]).max() > 1


@pytest.mark.full(quick=["t5_1_1_small-77", "t5_1_1_base-248"])
@pytest.mark.parametrize(
    "name,millions",
    [
        ("t5_1_1_small", 77),
        ("t5_1_1_base", 248),
        ("t5_1_1_large", 783),
        ("t5_1_1_xl", 2850),
        ("t5_1_1_xxl", 11135),
    ],
)
def test_presets_have_the_published_sizes(name, millions):
    shapes = jax.tree.leaves(T5Model(PRESETS[name]).abstract_params())
    assert round(sum(x.size for x in shapes) / 1e6) == millions


def test_hugging_face_folder_comes_back_bit_for_bit(shared, tmp_path):
    model, params = shared
    huggingface.save(tmp_path, model, params, np.float32)
    again, loaded = huggingface.load(tmp_path, Placement())
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, params, loaded)


def test_transformers_reads_our_export(shared, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, params = shared
    huggingface.save(tmp_path, model, params, np.float32)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = theirs(
            input_ids=torch.tensor(SOURCE[:1], dtype=torch.long),
            decoder_input_ids=torch.tensor(TARGET[:1], dtype=torch.long),
        ).logits.numpy()
    logits, _ = in_blocks(model, params, TARGET, [30], prefilled(model, params))
    np.testing.assert_allclose(logits[:1], expected, rtol=0, atol=1e-4)
