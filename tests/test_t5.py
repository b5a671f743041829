"""T5 against Hugging Face's, and the four laws of the LanguageModel protocol."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from speccascade_jax.checkpoints import huggingface
from speccascade_jax.checkpoints.arrays import Placement
from speccascade_jax.models.t5 import PRESETS, T5Config, T5Model

TINY = T5Config(vocab_size=97, d_model=48, d_kv=16, d_ff=80, num_heads=4, num_encoder_layers=3,
                num_decoder_layers=2, relative_buckets=8, relative_max_distance=12)
SOURCE = np.random.default_rng(0).integers(2, 97, (3, 20)).astype(np.int32)
LENGTH = np.array([20, 13, 1], np.int32)
TARGET = np.random.default_rng(1).integers(2, 97, (3, 30)).astype(np.int32)


def prefilled(model, params, max_length=64):
    _, cache = jax.jit(model.prefill, static_argnums=3)(params, SOURCE, LENGTH, max_length)
    return cache


def in_blocks(model, params, tokens, sizes, cache):
    """Logits of `tokens` fed in blocks of the given sizes."""
    extend, logits, begin = jax.jit(model.extend), [], 0
    for size in sizes:
        part, cache = extend(params, tokens[:, begin:begin + size], cache)
        logits.append(part)
        begin += size
    return np.concatenate(logits, axis=1), cache


@pytest.fixture(scope="module", params=[True, False], ids=["shared_table", "table_a_layer"])
def tiny(request):
    model = T5Model(dataclasses.replace(TINY, shared_position_bias=request.param))
    params = model.init(0)
    for name in ("encoder_bias", "decoder_bias"):  # far from zero: a table that is missed shows
        params[name] = params[name].replace(10 * params[name][...])
    return model, params


@pytest.fixture(scope="module")
def shared():
    model = T5Model(TINY)
    return model, model.init(0)


def hugging_face(config, seed=0):
    """transformers' T5 with random weights: T5 1.1 with a head of its own, or T5 1.0."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    described = {theirs: getattr(config, ours) for ours, theirs in huggingface.CONFIG_KEYS.items()}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(
        **described, feed_forward_proj="gated-gelu" if config.gated else "relu",
        tie_word_embeddings=config.tied_embeddings, decoder_start_token_id=config.pad_id))
    with torch.no_grad():
        for parameter in model.parameters():  # the defaults are too small or constant to test scales
            parameter.copy_(torch.randn_like(parameter) * (0.12 if parameter.ndim > 1 else 0.1)
                            + (1.0 if parameter.ndim == 1 else 0.0))
        model.shared.weight.copy_(torch.randn_like(model.shared.weight))
        if not config.tied_embeddings:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.3)
    return model.eval()


@pytest.mark.parametrize("config", [
    TINY, dataclasses.replace(TINY, gated=False, tied_embeddings=True)], ids=["t5_1_1", "t5_1_0"])
def test_logits_agree_with_hugging_face(config, tmp_path):
    torch = pytest.importorskip("torch")
    theirs = hugging_face(config)
    theirs.save_pretrained(tmp_path, safe_serialization=True)
    model, params = huggingface.load(tmp_path, Placement())
    assert model.config == config
    decoder_input = np.pad(TARGET[:, :-1], ((0, 0), (1, 0)))
    mask = np.arange(SOURCE.shape[1]) < LENGTH[:, None]
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(SOURCE, dtype=torch.long),
                          attention_mask=torch.tensor(mask, dtype=torch.long),
                          decoder_input_ids=torch.tensor(decoder_input, dtype=torch.long)).logits.numpy()
    assert np.ptp(expected) > 2  # weights large enough that a wrong scale or bias shows
    size = TARGET.shape[1]
    for sizes in ([size], [1] * size, [3, 7, 1, 6, 13]):
        logits, _ = in_blocks(model, params, decoder_input, sizes, prefilled(model, params))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_teacher_forcing_equals_decoding(tiny):
    model, params = tiny
    decoder_input = np.pad(TARGET[:, :-1], ((0, 0), (1, 0)))
    forced = nnx.merge(model.graphdef(), params)(SOURCE, LENGTH, decoder_input)
    stepped, _ = in_blocks(model, params, decoder_input, [5, 25], prefilled(model, params))
    np.testing.assert_allclose(forced, stepped, rtol=0, atol=1e-5)


def test_equal_tables_are_a_shared_table(shared):
    model, params = shared
    apart = T5Model(dataclasses.replace(TINY, shared_position_bias=False))
    tables = apart.init(1)
    nnx.update(tables, nnx.from_flat_state([
        (path, x.replace(jnp.stack([x[...]] * (3 if path == ("encoder_bias",) else 2)))
         if path[0].endswith("_bias") else x) for path, x in nnx.to_flat_state(params)]))
    for sizes in ([30], [5, 25]):
        expected, _ = in_blocks(model, params, TARGET, sizes, prefilled(model, params))
        found, _ = in_blocks(apart, tables, TARGET, sizes, prefilled(apart, tables))
        np.testing.assert_array_equal(found, expected)


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


@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [[30], [1] * 30], ids=["block", "steps"])
def test_bfloat16_is_float32_rounded(shared, sizes, cache_dtype):
    """One row at a time too, which takes a path of its own."""
    model, params = shared
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    half = dataclasses.replace(model, dtype="bfloat16", cache_dtype=cache_dtype)
    _, cache = half.prefill(params, SOURCE[:1], LENGTH[:1], 40)
    assert cache.keys[0].dtype == cache.cross_values[0].dtype == cache_dtype
    found, _ = in_blocks(half, params, TARGET[:1], sizes, cache)
    full = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    expected, _ = in_blocks(model, full, TARGET, [30], prefilled(model, full))
    np.testing.assert_allclose(found, expected[:1], atol=0.1)
    assert np.abs(found - expected[1:2]).max() > 1


@pytest.mark.parametrize("name,millions", [("t5_1_1_small", 77), ("t5_1_1_base", 248), ("t5_1_1_large", 783),
                                           ("t5_1_1_xl", 2850), ("t5_1_1_xxl", 11135)])
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
        expected = theirs(input_ids=torch.tensor(SOURCE[:1], dtype=torch.long),
                          decoder_input_ids=torch.tensor(TARGET[:1], dtype=torch.long)).logits.numpy()
    logits, _ = in_blocks(model, params, TARGET, [30], prefilled(model, params))
    np.testing.assert_allclose(logits[:1], expected, rtol=0, atol=1e-4)
