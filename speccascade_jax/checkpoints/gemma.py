"""Gemma 2 in Hugging Face folders: what config.json says and how the arrays are called there."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints.fields import check_fields
from speccascade_jax.checkpoints.files import shown
from speccascade_jax.models.gemma import GemmaConfig

CONFIG_KEYS = {
    "vocab_size": "vocab_size", "d_model": "hidden_size", "d_kv": "head_dim", "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "num_layers": "num_hidden_layers", "window": "sliding_window", "query_scalar": "query_pre_attn_scalar",
    "attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping",
    "rope_theta": "rope_theta", "norm_epsilon": "rms_norm_eps", "pad_id": "pad_token_id",
    "eos_id": "eos_token_id", "bos_id": "bos_token_id",
}


def layer_types(layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[n % 2] for n in range(layers)]


def read_config(where: Path, found: dict[str, Any]) -> GemmaConfig:
    """The GemmaConfig of a config.json's content. Raises ValueError for what Gemma 2 is not."""
    rope = found.get("rope_parameters")  # transformers 5 keeps rope_theta there
    found = {**(rope if isinstance(rope, dict) else {}), **found}
    if isinstance(found.get("eos_token_id"), list):  # -it models: <eos>, and <end_of_turn> to stop at
        found["eos_token_id"] = next(iter(found["eos_token_id"]), None)
    values = {ours: found[theirs] for ours, theirs in CONFIG_KEYS.items() if theirs in found}
    types = found.get("layer_types")  # as many as it lists, not as many as num_hidden_layers promises
    expected = {"layer_types": layer_types(len(types)) if isinstance(types, list) else None,
                "rope_parameters": rope if isinstance(rope, dict) else None, "rope_type": "default",
                "rope_scaling": None, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
                "tie_word_embeddings": True}
    for name, value in expected.items():
        if found.get(name) not in (value, None):
            raise ValueError(f"{where}: {name} is {shown(found[name])}, but Gemma 2's is {shown(value)}, and "
                             "no other is supported.")
    check_fields(where, GemmaConfig, values, CONFIG_KEYS)
    config = GemmaConfig(**values)
    check(where, config)
    if isinstance(types, list) and len(types) != config.num_layers:
        raise ValueError(f"{where}: layer_types names {len(types)} layers, num_hidden_layers is "
                         f"{config.num_layers}.")
    return config


def check(where: Any, config: GemmaConfig) -> None:
    """Raises ValueError naming what no Gemma 2 can have."""
    check_fields(where, GemmaConfig, dataclasses.asdict(config))
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"{where}: {config.num_heads} attention heads cannot share {config.num_kv_heads} "
                         "heads of keys and values: the second number divides the first.")
    if config.d_kv % 2:
        raise ValueError(f"{where}: a head's width is {config.d_kv}, but rotary positions turn pairs: it is "
                         "even.")


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
            "hidden_activation": "gelu_pytorch_tanh", "layer_types": layer_types(config.num_layers),
            "max_position_embeddings": 8192}
