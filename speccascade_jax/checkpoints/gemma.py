"""Gemma 2 in Hugging Face folders: what config.json says and how the arrays are called there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speccascade_jax.models.gemma import GemmaConfig

CONFIG_KEYS = {
    "vocab_size": "vocab_size", "d_model": "hidden_size", "d_kv": "head_dim", "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "num_layers": "num_hidden_layers", "window": "sliding_window", "query_scalar": "query_pre_attn_scalar",
    "attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping",
    "rope_theta": "rope_theta", "norm_epsilon": "rms_norm_eps", "pad_id": "pad_token_id",
    "eos_id": "eos_token_id", "bos_id": "bos_token_id",
}
OPTIONAL = {"attention_softcap", "logit_softcap"}  # null switches them off


def layer_types(config: GemmaConfig) -> list[str]:
    return [("sliding_attention", "full_attention")[n % 2] for n in range(config.num_layers)]


def read_config(folder: Path, found: dict[str, Any]) -> GemmaConfig:
    """The GemmaConfig of a config.json's content. Raises ValueError for what Gemma 2 is not."""
    found = {**(found.get("rope_parameters") or {}), **found}  # transformers 5 keeps rope_theta there
    if isinstance(found.get("eos_token_id"), list):  # -it models: <eos>, and <end_of_turn> to stop at
        found["eos_token_id"] = found["eos_token_id"][0]
    values = {ours: found[theirs] for ours, theirs in CONFIG_KEYS.items() if theirs in found}
    for name, value in values.items():
        if value is None and name in OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{folder / 'config.json'}: {CONFIG_KEYS[name]} is {value!r}, not a number: "
                             "fetch it again.")
    config = GemmaConfig(**values)
    for name, expected in (("layer_types", layer_types(config)), ("rope_type", "default"),
                           ("hidden_activation", "gelu_pytorch_tanh"), ("attention_bias", False),
                           ("tie_word_embeddings", True)):
        if found.get(name, expected) not in (expected, None):
            raise ValueError(f"{folder / 'config.json'}: {name} is {found[name]!r}, but Gemma 2's is "
                             f"{expected!r}, and no other is supported.")
    return config


def parameter_names(config: GemmaConfig) -> Iterator[tuple[tuple[Any, ...], str, bool]]:
    """(path in our parameters, Hugging Face's name, whether theirs is transposed) of every array."""
    yield ("embedding",), "model.embed_tokens.weight", False
    yield ("norm", "scale"), "model.norm.weight", False
    for n in range(config.num_layers):
        for ours, theirs in (("attention_norm", "input_layernorm"),
                             ("attention_post_norm", "post_attention_layernorm"),
                             ("mlp_norm", "pre_feedforward_layernorm"),
                             ("mlp_post_norm", "post_feedforward_layernorm")):
            yield ("layers", n, ours, "scale"), f"model.layers.{n}.{theirs}.weight", False
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
            yield (("layers", n, "attention", ours, "kernel"),
                   f"model.layers.{n}.self_attn.{theirs}_proj.weight", True)
        for name in ("gate", "up", "down"):
            yield ("layers", n, "mlp", name, "kernel"), f"model.layers.{n}.mlp.{name}_proj.weight", True


def describe(config: GemmaConfig) -> dict[str, Any]:
    """The content of config.json."""
    return {**{theirs: getattr(config, ours) for ours, theirs in CONFIG_KEYS.items()},
            "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh", "layer_types": layer_types(config),
            "max_position_embeddings": 8192}
