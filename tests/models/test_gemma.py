"""Gemma 2 against Hugging Face's, greedy cascades, and DeepMind's own checkpoints."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util
from shapes import LENGTH, SOURCE, TARGET, TINY_GEMMA
from tiny_models import in_blocks, prefilled

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import deepmind, huggingface
from speccascade_jax.checkpoints.arrays import Placement
from speccascade_jax.checkpoints.decoder import describe
from speccascade_jax.core.loop import generate
from speccascade_jax.core.protocols import LanguageModel
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.models import decoder
from speccascade_jax.models.decoder import DecoderModel
from speccascade_jax.models.presets import GEMMA2, GEMMA3, PRESETS

AFTER_PROMPT = np.concatenate([SOURCE[np.arange(3), LENGTH - 1][:, None], TARGET[:, :-1]], axis=1)


@pytest.fixture(scope="module")
def tiny():
    model = DecoderModel(TINY_GEMMA)
    return model, model.init(0)


def hugging_face(config, seed=0):
    """transformers' Gemma 2 with random weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    described = {name: value for name, value in describe(config).items() if name != "architectures"}
    model = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**described, attn_implementation="eager")
    )
    with torch.no_grad():
        for parameter in model.parameters():  # the defaults are too small to reach the caps
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def their_logits(theirs, chosen=slice(None)):
    """Logits [3, 30, V] of transformers' model after each of AFTER_PROMPT, a row at a time."""
    torch = pytest.importorskip("torch")
    rows = []
    for source, length, target in zip(SOURCE, LENGTH, TARGET, strict=True):
        tokens = np.concatenate([source[:length], target[:-1]])
        with torch.no_grad():
            rows.append(
                theirs(input_ids=torch.tensor(tokens[None], dtype=torch.long)).logits[0, length - 1 :]
            )
    return np.stack([row.numpy() for row in rows])[chosen]


CONFIGS = {
    "tiny": TINY_GEMMA,
    "no caps": dataclasses.replace(TINY_GEMMA, attention_softcap=None, logit_softcap=None),
    "one head each": dataclasses.replace(TINY_GEMMA, num_kv_heads=6, rope_theta=100.0),
}


@pytest.mark.full
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_agree_with_hugging_face(config, tmp_path):
    """Prompts of 20, 13 and 1 tokens, read whole or in chunks, then 30 more in blocks: the window is 7."""
    theirs = hugging_face(config)
    theirs.save_pretrained(tmp_path)
    model, params = huggingface.load(tmp_path, Placement())
    assert model.config == config
    expected = their_logits(theirs)
    assert np.ptp(expected) > 4  # weights large enough that a wrong scale, cap or window shows
    for chunk, sizes in ((512, [30]), (512, [1] * 30), (8, [3, 7, 1, 6, 13])):
        chunked = dataclasses.replace(model, chunk=chunk)
        logits, _ = in_blocks(model, params, AFTER_PROMPT, sizes, prefilled(chunked, params))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.full(quick=["change0", "change1"])
@pytest.mark.parametrize(
    "change",
    [
        {"window": 8},
        {"attention_softcap": None},
        {"query_scalar": 16},
        {"logit_softcap": 3.1},
        {"rope_theta": 9e3},
    ],
)
def test_every_part_of_the_shape_matters(change, tiny):
    """Negative controls: what the comparison with transformers holds, it could have missed."""
    model, params = tiny
    other = DecoderModel(dataclasses.replace(TINY_GEMMA, **change))
    a, b = (in_blocks(m, params, AFTER_PROMPT, [30], prefilled(m, params))[0] for m in (model, other))
    assert np.abs(a - b).max() > 1e-3


def test_transformers_reads_our_export(tiny, tmp_path):
    transformers = pytest.importorskip("transformers")
    model, params = tiny
    huggingface.save(tmp_path, model, params, np.float32)
    again, loaded = huggingface.load(tmp_path, Placement())
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, params, loaded)
    theirs = transformers.Gemma2ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    logits, _ = in_blocks(model, params, AFTER_PROMPT, [30], prefilled(model, params))
    np.testing.assert_allclose(logits, their_logits(theirs), rtol=0, atol=1e-4)


@pytest.mark.full
def test_bfloat16_is_float32_rounded(tiny):
    model, params = tiny
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    half = dataclasses.replace(model, dtype="bfloat16", cache_dtype="bfloat16")
    cache = prefilled(half, params)
    assert cache.keys[0].dtype == cache.values[-1].dtype == jnp.bfloat16
    logits, _ = in_blocks(half, params, TARGET, [30], cache)
    full = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    expected, _ = in_blocks(model, full, TARGET, [30], prefilled(model, full))
    np.testing.assert_allclose(logits, expected, atol=0.1)
    assert np.abs(logits - expected[::-1]).max() > 1


@pytest.mark.full
@pytest.mark.parametrize("block_size", [1, 4])
def test_greedy_speculative_is_the_verifier(tiny, block_size):
    model, large = tiny
    small = jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, large, model.init(1))
    assert isinstance(model, LanguageModel)
    keys = jax.vmap(jax.random.key)(jnp.arange(3))
    speculative = Speculative(Autoregressive(model), model, METHODS["speculative"], block_size)
    greedy = SamplingOptions(temperature=0.0)
    result, alone = (
        generate(
            sampler,
            params,
            keys,
            SOURCE,
            LENGTH,
            greedy,
            jnp.zeros(sampler.level),
            max_new_tokens=25,
            eos_id=-1,
        )
        for sampler, params in ((speculative, (small, large)), (Autoregressive(model), large))
    )
    np.testing.assert_array_equal(result.tokens, alone.tokens)
    assert 0 < int(result.counts[1].accepted.sum()) < int(result.counts[1].drafted.sum())


@pytest.mark.full(quick=["gemma2_2b-2614"])
@pytest.mark.parametrize("name,millions", [("gemma2_2b", 2614), ("gemma2_9b", 9242), ("gemma2_27b", 27227)])
def test_presets_have_the_published_sizes(name, millions):
    shapes = jax.tree.leaves(DecoderModel(PRESETS[name]).abstract_params())
    assert round(sum(x.size for x in shapes) / 1e6) == millions


def deepmind_tree(config, params, transposed, nested):
    """Parameters under the names and in the shapes of google-deepmind/gemma's checkpoints, in float32."""
    c, flat = config, {path: np.asarray(x[...]) for path, x in nnx.to_flat_state(params)}

    def heads(kernel, count):
        return np.moveaxis(kernel.reshape(c.d_model, count, c.d_kv), 1, 0)

    padding = np.zeros((3, c.d_model), np.float32)
    tree = {
        "embedder": {"input_embedding": np.concatenate([flat["embedding",], padding])},
        "final_norm": {"scale": flat["norm", "scale"]},
    }
    for n in range(c.num_layers):
        layer = {path[2:]: array for path, array in flat.items() if path[:2] == ("layers", n)}
        query, key, value = (
            heads(layer["attention", name, "kernel"], count)
            for name, count in (("query", c.num_heads), ("key", c.num_kv_heads), ("value", c.num_kv_heads))
        )
        if c.num_heads == c.num_kv_heads:
            tree[f"layer_{n}/attn/qkv_einsum"] = {"w": np.stack([query, key, value])}
        else:
            tree[f"layer_{n}/attn/q_einsum"] = {"w": query}
            tree[f"layer_{n}/attn/kv_einsum"] = {"w": np.stack([key, value])}
        gating = np.stack([layer["mlp", name, "kernel"] for name in ("gate", "up")])
        tree[f"layer_{n}/attn/attn_vec_einsum"] = {
            "w": layer["attention", "out", "kernel"].reshape(c.num_heads, c.d_kv, c.d_model)
        }
        tree[f"layer_{n}/mlp/gating_einsum"] = {"w": np.swapaxes(gating, 1, 2) if transposed else gating}
        tree[f"layer_{n}/mlp/linear"] = {"w": layer["mlp", "down", "kernel"]}
        if c.head_norms:
            for name in ("query", "key"):
                tree[f"layer_{n}/attn/_{name}_norm"] = {"scale": layer["attention", f"{name}_norm", "scale"]}
        for ours, theirs in (
            ("attention_norm", "pre_attention_norm"),
            ("mlp_norm", "pre_ffw_norm"),
            ("attention_post_norm", "post_attention_norm"),
            ("mlp_post_norm", "post_ffw_norm"),
        ):
            tree[f"layer_{n}/{theirs}"] = {"scale": layer[ours, "scale"]}
    if not nested:
        return {f"transformer/{name}": arrays for name, arrays in tree.items()}
    return traverse_util.unflatten_dict(
        {
            f"{name}/{key}".removesuffix("/w") if "/mlp/" in name else f"{name}/{key}": array
            for name, arrays in tree.items()
            for key, array in arrays.items()
        },
        sep="/",
    )


@pytest.mark.full(quick=["False-False-2"])
@pytest.mark.parametrize(
    "transposed,nested,kv_heads", [(False, False, 2), (True, False, 6), (True, True, 2), (True, True, 1)]
)
def test_deepminds_own_checkpoints(transposed, nested, kv_heads, tmp_path, monkeypatch):
    """Of Gemma 2; of Gemma 3 with one head of keys."""
    import orbax.checkpoint as ocp

    config = dataclasses.replace(
        GEMMA3 if kv_heads == 1 else GEMMA2,
        vocab_size=97,
        d_model=48,
        d_kv=16,
        d_ff=80,
        num_heads=6,
        num_kv_heads=kv_heads,
        num_layers=3,
        query_scalar=16,
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: rng.standard_normal(x.shape, dtype=np.float32), DecoderModel(config).abstract_params()
    )
    monkeypatch.setattr(deepmind, "VOCABULARY", 97)
    monkeypatch.setattr(deepmind, "PADDED_VOCABULARY", 100)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "flax", deepmind_tree(config, params, transposed, nested))
    loaded = checkpoints.load(tmp_path / "flax", config=config)
    jax.tree.map(np.testing.assert_array_equal, params, loaded.params)
    assert checkpoints.config_of(str(tmp_path / "flax")) == config
    tree = deepmind_tree(config, params, transposed, nested)
    del (tree["layer_1"] if nested else tree)[
        "post_ffw_norm" if nested else "transformer/layer_1/post_ffw_norm"
    ]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "incomplete", tree)
    with pytest.raises(ValueError, match="layer_1/post_ffw_norm/scale is missing"):
        checkpoints.load(tmp_path / "incomplete")


@pytest.mark.full
def test_long_prompts_need_bounded_temporaries(monkeypatch):
    """Attention that computes few scores at once gives the same, in less memory."""
    model = DecoderModel(TINY_GEMMA, chunk=128)
    params, inputs, length = jax.jit(lambda: model.init(0))(), np.full((1, 128), 5), np.array([120])
    inputs[0, ::3] = 7
    caches, temporaries = [], []
    for scores in (decoder.SCORES, 2**14):  # 6 heads, 1,024 entries: two tokens at once
        monkeypatch.setattr(decoder, "SCORES", scores)
        read = jax.jit(lambda params: model.prefill(params, inputs, length, 1024)[1])
        program = read.lower(params).compile()
        temporaries.append(program.memory_analysis().temp_size_in_bytes)
        caches.append(program(params))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *caches)
    assert temporaries[0] > 6 * 128 * 1024 * 4 > 2 * temporaries[1]
