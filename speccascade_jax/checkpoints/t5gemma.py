"""T5Gemma in Hugging Face folders: config.json and the names of the arrays."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints import decoder
from speccascade_jax.checkpoints.fields import check_fields
from speccascade_jax.checkpoints.files import shown
from speccascade_jax.models.t5gemma import T5GemmaConfig

PARTS = "encoder", "decoder"
UNUSED = frozenset({"lm_head.out_proj.weight"})  # a copy of the decoder's embedding if that is the head
NORMS = {
    "attention_norm": "pre_self_attn_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
CROSS_NORMS = {"cross_norm": "pre_cross_attn_layernorm", "cross_post_norm": "post_cross_attn_layernorm"}


def read_config(where: Path, content: dict[str, Any]) -> T5GemmaConfig:
    """The T5GemmaConfig of a config.json's content. Raises ValueError for anything but T5Gemma."""
    parts = {}
    for name in PARTS:
        part = content.get(name)
        if not isinstance(part, dict):
            raise ValueError(f"{where}: {name} is {shown(part)}, not an object.")
        ends = {
            key: content[key]
            for key in ("eos_token_id", "tie_word_embeddings")
            if name == "decoder" and content.get(key) is not None
        }
        parts[name] = decoder.read_config(Path(f"{where}: {name}"), {**part, **ends, "model_type": "gemma2"})
    width = content["decoder"].get("cross_attention_hidden_size")
    if width not in (None, parts["encoder"].d_model):
        raise ValueError(
            f"{where}: decoder: cross_attention_hidden_size is {shown(width)}, but the "
            f"encoder's "
            f"hidden_size is {parts['encoder'].d_model}."
        )
    parts["encoder"] = dataclasses.replace(parts["encoder"], tied_embeddings=True, more_eos=())
    config = T5GemmaConfig(**parts)
    check(where, config)
    return config


def check(where: Any, config: T5GemmaConfig) -> None:
    """Raises ValueError naming a value that no T5Gemma can have."""
    check_fields(where, T5GemmaConfig, vars(config))
    for name in PARTS:
        part = getattr(config, name)
        decoder.check(f"{where}: {name}", part)
        if part.family != "gemma2":
            raise ValueError(f"{where}: {name} is a {part.family}; only gemma2 is supported.")
    if config.encoder.vocab_size != config.decoder.vocab_size:
        raise ValueError(
            f"{where}: the encoder has {config.encoder.vocab_size} tokens, the decoder "
            f"{config.decoder.vocab_size}: they must be the same."
        )


def describe(config: T5GemmaConfig) -> dict[str, Any]:
    """The content of config.json. Raises ValueError for a model that T5Gemma's code cannot represent."""
    parts = {
        name: decoder.describe(getattr(config, name))
        | {"model_type": "t5_gemma_module", "is_decoder": name == "decoder"}
        for name in PARTS
    }
    for part in parts.values():
        del part["architectures"]
    parts["decoder"]["cross_attention_hidden_size"] = config.encoder.d_model
    return parts | {
        "model_type": "t5gemma",
        "architectures": ["T5GemmaForConditionalGeneration"],
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.decoder.tied_embeddings,
        **{name: parts["decoder"][name] for name in ("pad_token_id", "eos_token_id", "bos_token_id")},
    }


def parameter_names(config: T5GemmaConfig) -> Iterator[tuple[tuple[Any, ...], str, bool]]:
    """(path in our parameters, Hugging Face's name, whether theirs is transposed) of every array."""
    for name in PARTS:
        cross = CROSS_NORMS if name == "decoder" else {}
        for path, theirs, transposed in decoder.parameter_names(getattr(config, name), NORMS | cross):
            if theirs == "lm_head.weight":
                yield (name, *path), "lm_head.out_proj.weight", transposed
                continue
            theirs = theirs.replace("model.", f"model.{name}.", 1)
            yield (name, *path), theirs, transposed
            if cross and path[2:3] == ("attention",):
                ours = (name, *path[:2], "cross", *path[3:])
                yield ours, theirs.replace("self_attn", "cross_attn"), transposed
