"""Gemma 4's text model against transformers': logits, folders of three kinds, and greedy texts."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from shapes import GEMMA4S, LENGTH, SOURCE, TARGET, TINY_GEMMA4
from tiny_models import greedy, in_blocks, prefilled, random_checkpoint, their_texts, transformers_gemma4

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import decoder, huggingface
from speccascade_jax.checkpoints.arrays import Placement
from speccascade_jax.checkpoints.gemma4 import describe, read_config
from speccascade_jax.commands.convert import main as convert
from speccascade_jax.models.gemma4 import PRESETS, Gemma4Model

AFTER_PROMPT = np.concatenate([SOURCE[np.arange(3), LENGTH - 1][:, None], TARGET[:, :-1]], axis=1)


def their_logits(theirs):
    """Logits [3, 30, V] of transformers' model after each of AFTER_PROMPT, a row at a time."""
    torch, rows = pytest.importorskip("torch"), []
    for source, length, target in zip(SOURCE, LENGTH, TARGET, strict=True):
        tokens = torch.tensor(np.concatenate([source[:length], target[:-1]])[None].astype(np.int64))
        with torch.no_grad():
            rows.append(theirs(input_ids=tokens).logits[0, length - 1 :].numpy())
    return np.stack(rows)


@pytest.mark.full(quick=["gemma4"])
@pytest.mark.parametrize("config", GEMMA4S.values(), ids=GEMMA4S)
def test_logits_agree_with_transformers(config, tmp_path):
    """Their folder here, ours there: prompts of 20, 13 and 1 tokens, whole or in chunks, then 30 in blocks,
    and 13 after a roll back."""
    theirs = transformers_gemma4(config)
    theirs.save_pretrained(tmp_path / "theirs")
    model, params = huggingface.load(tmp_path / "theirs", Placement())
    assert model.config == config
    expected = their_logits(theirs.double())  # in float32 it is the less exact of the two
    assert np.ptp(expected) > 4  # weights large enough that a wrong scale, norm or window shows
    for chunk, sizes in ((512, [1] * 30), (8, [13, 4, 13])):
        chunked = dataclasses.replace(model, chunk=chunk)
        logits, cache = in_blocks(model, params, AFTER_PROMPT, sizes, prefilled(chunked, params))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    kept = np.array([3, 17, 0])
    cache = model.roll_back(cache, LENGTH - 1 + kept)
    again = AFTER_PROMPT[np.arange(3)[:, None], kept[:, None] + np.arange(13)]
    logits, _ = in_blocks(model, params, again, [13], cache)
    for row, begin in enumerate(kept):
        np.testing.assert_allclose(logits[row], expected[row, begin : begin + 13], rtol=0, atol=1e-4)
    huggingface.save(tmp_path / "ours", model, params, np.float32)
    returned = type(theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    for name, array in theirs.state_dict().items():
        np.testing.assert_array_equal(returned.state_dict()[name], array)


@pytest.mark.full
def test_greedy_texts_are_those_of_transformers(tmp_path):
    """Of a hundred prompts, all in one batch here and by their lengths there."""
    theirs = transformers_gemma4(TINY_GEMMA4)
    theirs.save_pretrained(tmp_path)
    model, params = huggingface.load(tmp_path, Placement())
    texts = greedy(model, params)
    np.testing.assert_array_equal(texts, their_texts(theirs))
    assert len(np.unique(texts)) > 30


@pytest.mark.full
@pytest.mark.parametrize(
    "change",
    [
        {"window": 6},
        {"rope_theta": 400.0},
        {"local_rope_theta": 51.0},
        {"rope_share": 0.5},
        {"logit_softcap": 3.1},
        {"norm_epsilon": 1e-2},
        {"activation": "silu"},
    ],
)
def test_every_part_of_the_shape_matters(change, tiny):
    """Negative controls: what the comparison with transformers holds, it could have missed."""
    params, usual = tiny
    other = Gemma4Model(dataclasses.replace(TINY_GEMMA4, d_kv_global=16, num_kv_heads_global=1, **change))
    logits = in_blocks(other, params, AFTER_PROMPT, [30], prefilled(other, params))[0]
    assert np.abs(logits - usual).max() > 1e-3


@pytest.fixture(scope="module")
def tiny():
    model = Gemma4Model(dataclasses.replace(TINY_GEMMA4, d_kv_global=16, num_kv_heads_global=1))
    params = model.init(0)
    return params, in_blocks(model, params, AFTER_PROMPT, [30], prefilled(model, params))[0]


# ---- folders --------------------------------------------------------------------------------------------


def seeing(config, kind):
    """The config.json of a model that also sees, as transformers 5.23 writes it."""
    transformers = pytest.importorskip("transformers")
    described = describe(config) | {"eos_token_id": 1}
    text, whole = {
        "gemma4": (transformers.Gemma4TextConfig, transformers.Gemma4Config),
        "gemma4_unified": (transformers.Gemma4UnifiedTextConfig, transformers.Gemma4UnifiedConfig),
    }[kind]
    for name in ("architectures", "model_type"):
        del described[name]
    return whole(text_config=text(**described).to_dict(), eos_token_id=[1, 5]).to_dict()


@pytest.mark.parametrize("kind,name", [("gemma4", "gemma4"), ("gemma4_unified", "gemma4, dense")])
def test_the_text_model_of_one_that_sees(kind, name, tmp_path):
    """Under other names, next to arrays that are not read: readers' keys, pictures and sounds."""
    from safetensors.numpy import load_file, save_file

    config = dataclasses.replace(GEMMA4S[name], more_eos=(5,))
    original = random_checkpoint(config)
    checkpoints.save(tmp_path / "text", original, "huggingface")
    arrays = load_file(tmp_path / "text" / "model.safetensors")
    arrays = {name.replace("model.", "model.language_model.", 1): array for name, array in arrays.items()}
    more = [f"model.{name}.weight" for name in ("vision_tower.x", "audio_tower.x", "embed_vision.x")]
    if config.num_readers:
        more += [f"model.language_model.layers.4.self_attn.{name}_proj.weight" for name in "kv"]
    (tmp_path / "whole").mkdir()
    save_file(
        arrays | {name: np.ones(3, np.float32) for name in more}, tmp_path / "whole" / "model.safetensors"
    )
    (tmp_path / "whole" / "config.json").write_text(json.dumps(seeing(config, kind)))
    loaded = checkpoints.load(tmp_path / "whole")
    assert loaded.model.config == config
    jax.tree.map(np.testing.assert_array_equal, original.params, loaded.params)


def test_published_configs_are_the_presets():
    """As their converter describes them, in the spelling before and since transformers 5.23."""
    transformers = pytest.importorskip("transformers")
    rope = describe(PRESETS["gemma4_e2b"])["rope_parameters"]
    local, full = "sliding_attention", "full_attention"
    shared = {"final_logit_softcapping": 30.0, "rope_parameters": rope, "model_type": "gemma4_text"}
    published = {
        "gemma4_e2b": {
            "hidden_size": 1536,
            "hidden_size_per_layer_input": 256,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "layer_types": [*[local] * 4, full] * 7,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
        },
        "gemma4_e4b": {
            "hidden_size": 2560,
            "hidden_size_per_layer_input": 256,
            "intermediate_size": 10240,
            "num_hidden_layers": 42,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "global_head_dim": 512,
            "num_kv_shared_layers": 18,
        },
        "gemma4_31b": {
            "hidden_size": 5376,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "use_bidirectional_attention": "vision",
            "sliding_window": 1024,
            "max_position_embeddings": 262144,
        },
    }
    assert published.keys() == PRESETS.keys()
    for name, content in published.items():
        content |= shared
        assert read_config("it", content) == PRESETS[name], name
        written = json.loads(json.dumps(transformers.Gemma4TextConfig(**content).to_dict()))
        assert "per_layer_config" in written and read_config("it", written) == PRESETS[name], name


@pytest.mark.full(quick=["gemma4_e2b-4629"])
@pytest.mark.parametrize("name,millions", [("gemma4_e2b", 4629), ("gemma4_e4b", 7463), ("gemma4_31b", 30697)])
def test_presets_have_the_published_sizes(name, millions):
    """Without the towers that see and hear."""
    shapes = jax.tree.leaves(Gemma4Model(PRESETS[name]).abstract_params())
    assert round(sum(x.size for x in shapes) / 1e6) == millions


SIZES = {"1": {"head_dim": 16}, "3": {"head_dim": 16}, "5": {"head_dim": 16}}
WRONG = [
    ({"enable_moe_block": True}, "experts"),
    ({"use_bidirectional_attention": "all"}, "reads ahead"),
    ({"hidden_size": None}, "hidden_size is None"),
    ({"hidden_activation": "relu6"}, "relu6"),
    ({"num_kv_shared_layers": 6}, "one at least has keys"),
    ({"num_kv_shared_layers": 5}, "of their kind"),
    ({"num_kv_shared_layers": "x"}, "num_kv_shared_layers is 'x'"),
    ({"global_head_dim": 9}, "even"),
    ({"num_global_key_value_heads": 3}, "cannot share"),
    ({"vocab_size_per_layer_input": 90}, "vocab_size_per_layer_input is 90"),
    ({"layer_types": ["full"] * 6}, "layer_types is"),
    ({"layer_types": ["full_attention"]}, "names 1 layers"),
    ({"rope_parameters": [1]}, "rope_parameters is"),
    ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "only proportional"),
    ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 2.0}}}, "at most 1"),
    ({"per_layer_config": {"2": {"head_dim": 16}}}, "may differ between"),
    ({"per_layer_config": SIZES | {"1": {"head_dim": 12}}}, "may differ between"),
    ({"per_layer_config": SIZES | {"9": {"head_dim": 12}}}, "per_layer_config is"),
    ({"per_layer_config": {"1": {"sliding_window": 3}}}, "only head_dim"),
    ({"per_layer_config": [1]}, "not an object of objects"),
    ({"eos_token_id": [1, 97]}, "no tokens"),
]


@pytest.mark.parametrize("change,words", WRONG, ids=lambda x: str(x)[:50])
def test_what_no_model_can_be_is_one_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        read_config("it", describe(TINY_GEMMA4) | change)


def test_experts_are_refused_with_code_2(tmp_path, capsys):
    content = {"model_type": "gemma4", "text_config": describe(TINY_GEMMA4) | {"enable_moe_block": True}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert convert([str(tmp_path), str(tmp_path / "out"), "--to=native"]) == 2
    said = capsys.readouterr().err
    assert "experts" in said and said.count("\n") == 1


def test_what_the_familys_code_cannot_be_is_not_exported():
    with pytest.raises(ValueError, match="num_kv_heads_global"):
        describe(dataclasses.replace(TINY_GEMMA4, keys_are_values=False))


def test_a_text_model_of_none_that_sees_is_as_it_was():
    content = describe(TINY_GEMMA4)
    assert decoder.text_part(content) is content
