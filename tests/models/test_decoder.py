"""The families that only decode against transformers': logits, the folders of both, and greedy texts."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from shapes import DECODERS, LENGTH, SOURCE, TARGET
from tiny_models import greedy, in_blocks, prefilled, their_texts, transformers_decoder

from speccascade_jax.checkpoints import huggingface
from speccascade_jax.checkpoints.arrays import Placement
from speccascade_jax.checkpoints.decoder import describe, read_config
from speccascade_jax.commands.convert import main as convert
from speccascade_jax.models.decoder import DecoderModel

AFTER_PROMPT = np.concatenate([SOURCE[np.arange(3), LENGTH - 1][:, None], TARGET[:, :-1]], axis=1)
MORE = {  # what the law tests' shapes leave out
    "llama, plain": dataclasses.replace(
        DECODERS["llama"],
        query_bias=False,
        output_bias=False,
        mlp_bias=False,
        rope_type="default",
        rope_length=None,
        rope_factor=1.0,
        tied_embeddings=True,
        more_eos=(),
    ),
    "mistral, no window": dataclasses.replace(DECODERS["mistral"], window=None, local=()),
    "qwen3, yarn": dataclasses.replace(
        DECODERS["qwen3"],
        rope_type="yarn",
        rope_low=1.0,
        rope_high=32.0,
        rope_theta=1e4,
        rope_length=16,
        rope_attention=1.0,
        max_positions=64,
        window=6,
        local=(0, 1),
        num_kv_heads=4,
    ),
    "gemma3, capped": dataclasses.replace(
        DECODERS["gemma3_text"],
        rope_type="default",
        rope_factor=1.0,
        logit_softcap=3.0,
        tied_embeddings=False,
    ),
}


def their_logits(theirs, by_token):
    """Logits [3, 30, V] of transformers' model after each of AFTER_PROMPT, a row at a time; `by_token`: the
    prompt at once, and then token by token."""
    torch, rows = pytest.importorskip("torch"), []
    for source, length, target in zip(SOURCE, LENGTH, TARGET, strict=True):
        tokens = torch.tensor(np.concatenate([source[:length], target[:-1]])[None].astype(np.int64))
        with torch.no_grad():
            if not by_token:
                rows.append(theirs(input_ids=tokens).logits[0, length - 1 :])
                continue
            step = theirs(input_ids=tokens[:, :length], use_cache=True)
            logits = [step.logits[0, -1]]
            for n in range(length, tokens.shape[1]):
                step = theirs(
                    input_ids=tokens[:, n : n + 1], past_key_values=step.past_key_values, use_cache=True
                )
                logits.append(step.logits[0, -1])
            rows.append(torch.stack(logits))
    return np.stack([row.numpy() for row in rows])


@pytest.mark.full(quick=["qwen2"])
@pytest.mark.parametrize("config", (DECODERS | MORE).values(), ids=DECODERS | MORE)
def test_logits_agree_with_transformers(config, tmp_path):
    """Their folder here, ours there: prompts of 20, 13 and 1 tokens, whole or in chunks, then 30 in
    blocks."""
    theirs, by_token = transformers_decoder(config), config.rope_type == "dynamic"
    theirs.save_pretrained(tmp_path / "theirs")
    model, params = huggingface.load(tmp_path / "theirs", Placement())
    again = dataclasses.replace(model.config, query_scalar=config.query_scalar)
    assert dataclasses.asdict(again) == dataclasses.asdict(config)
    expected = their_logits(theirs, by_token)
    assert np.ptp(expected) > 4  # weights large enough that a wrong scale, cap or window shows
    for chunk, sizes in ((512, [1] * 30), (8, [13, 4, 13])):
        chunked = dataclasses.replace(model, chunk=chunk)
        logits, _ = in_blocks(model, params, AFTER_PROMPT, sizes, prefilled(chunked, params))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    huggingface.save(tmp_path / "ours", model, params, np.float32)
    returned = type(theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    for name, array in theirs.state_dict().items():
        np.testing.assert_array_equal(returned.state_dict()[name], array)
    np.testing.assert_allclose(their_logits(returned, by_token), expected, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("family", DECODERS)
def test_greedy_texts_are_those_of_transformers(family, tmp_path):
    """Of a hundred prompts, all in one batch here and by their lengths there."""
    theirs = transformers_decoder(DECODERS[family])
    theirs.save_pretrained(tmp_path)
    model, params = huggingface.load(tmp_path, Placement())
    texts = greedy(model, params)
    np.testing.assert_array_equal(texts, their_texts(theirs))
    assert len(np.unique(texts)) > 30


# ---- config.json, as transformers 4 and 5 write it ------------------------------------------------------


def as_transformers_5(content):
    """config.json in the spelling of transformers 5: rope_parameters, dtype."""
    content = dict(content)
    theta, scaling = content.pop("rope_theta"), content.pop("rope_scaling") or {"rope_type": "default"}
    full = {"rope_theta": theta, **scaling}
    local = content.pop("rope_local_base_freq", None)
    content["rope_parameters"] = (
        full
        if local is None
        else {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    )
    return content


@pytest.mark.parametrize("config", (DECODERS | MORE).values(), ids=DECODERS | MORE)
def test_both_spellings_say_the_same(config, tmp_path):
    old = describe(config)
    shape = read_config(tmp_path, json.loads(json.dumps(old)))
    assert shape == read_config(tmp_path, json.loads(json.dumps(as_transformers_5(old))))
    assert dataclasses.replace(shape, query_scalar=config.query_scalar) == config


def test_published_configs_are_the_presets():
    """As they are at the hub, in transformers 4's spelling: fields that are left out are the family's
    usual."""
    from speccascade_jax.models.presets import PRESETS

    qwen = {
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    assert read_config("it", qwen) == dataclasses.replace(PRESETS["qwen3_0.6b"], eos_id=151645)
    llama = {
        "model_type": "llama",
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    }
    assert dataclasses.replace(read_config("it", llama), pad_id=128001) == dataclasses.replace(
        PRESETS["llama3_1b"], more_eos=(128008, 128009)
    )
    text = {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    seeing = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text, "vision_config": {}}
    assert read_config("it", huggingface.decoder.text_part(seeing)) == dataclasses.replace(
        PRESETS["gemma3_12b"], more_eos=(106,)
    )


WRONG = [
    ("qwen3", {"hidden_size": None}, "hidden_size"),
    ("qwen3", {"num_hidden_layers": 10**9}, "layers"),
    ("qwen3", {"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "low_freq_factor is missing"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "at least 1"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "factor is 'x'"),
    ("llama", {"hidden_act": "relu6"}, "relu6"),
    ("qwen2", {"max_window_layers": "x", "layer_types": None}, "max_window_layers"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
    ("gemma3_text", {"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern"),
    ("gemma2", {"sliding_window": None}, "sliding_window is None"),
    ("llama", {"head_dim": 9}, "even"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"eos_token_id": [1, 97]}, "no tokens"),
    ("mistral", {"vocab_size": 10**30}, "vocab_size"),
]


@pytest.mark.parametrize("family,change,words", WRONG, ids=lambda x: str(x)[:40])
def test_what_no_model_can_be_is_one_sentence(family, change, words):
    with pytest.raises(ValueError, match=words):
        read_config("it", describe(DECODERS[family]) | change)


UNREAD = {  # what a folder holds besides its config.json, what that says otherwise, and what is said
    "quantised": ({}, {"quantization_config": {"quant_method": "awq"}}, "quantised weights"),
    "adapter": (
        {"adapter_config.json": "{}", "adapter_model.safetensors": ""},
        {},
        "adapter without its model",
    ),
    "adapter alone": ({"adapter_config.json": "{}"}, None, "adapter without its model"),
    "a near name": ({}, {"model_type": "qwen"}, "nearest is qwen2"),
    "shards": (
        {"model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors"}})},
        {},
        "model-1.safetensors is missing",
    ),
    "no such size": ({"model.safetensors": ""}, {"hidden_size": 10**12}, "hidden_size is 1000000000000"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_a_folder_that_cannot_be_read_is_one_sentence_and_code_2(case, tmp_path, capsys):
    files, change, words = UNREAD[case]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    if change is not None:
        (tmp_path / "config.json").write_text(json.dumps(describe(DECODERS["qwen3"]) | change))
    assert convert([str(tmp_path), str(tmp_path / "out"), "--to=native"]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "name", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_size_that_is_missing_is_named(name):
    content = describe(DECODERS["llama"])
    del content[name]
    with pytest.raises(ValueError, match=f"{name} is missing"):
        read_config("it", content)


def test_what_a_familys_code_cannot_be_is_not_exported():
    for change, words in (
        ({"head_norms": True}, "head_norms"),
        ({"window": 5, "local": (1,)}, "window|local"),
        ({"query_scalar": 3}, "query_scalar"),
    ):
        with pytest.raises(ValueError, match=words):
            describe(dataclasses.replace(DECODERS["llama"], **change))


@pytest.mark.full
@pytest.mark.parametrize(
    "change",
    [
        {"window": 6},
        {"rope_factor": 5.0},
        {"rope_length": 17},
        {"rope_low": 0.6},
        {"rope_high": 2.2},
        {"rope_attention": 1.12},
        {"local": (1, 1)},
        {"rope_theta": 101.0},
        {"rope_truncate": True},
    ],
)
def test_every_part_of_the_shape_matters(change, tiny):
    """Negative controls: what the comparison with transformers holds, it could have missed."""
    params, usual = tiny
    other = DecoderModel(dataclasses.replace(DECODERS["qwen2"], **change))
    assert (
        np.abs(in_blocks(other, params, AFTER_PROMPT, [30], prefilled(other, params))[0] - usual).max() > 1e-3
    )


@pytest.fixture(scope="module")
def tiny():
    model = DecoderModel(DECODERS["qwen2"])
    params = jax.tree.map(lambda x: 3 * x, model.init(0))
    return params, in_blocks(model, params, AFTER_PROMPT, [30], prefilled(model, params))[0]
