"""T5Gemma 2 in Hugging Face folders: config.json and the names of the arrays.

Only the text model is read; all published models also have vision parts.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints import decoder
from speccascade_jax.checkpoints.fields import check_fields
from speccascade_jax.checkpoints.files import shown
from speccascade_jax.checkpoints.t5gemma import NORMS, PARTS
from speccascade_jax.models.t5gemma2 import T5Gemma2Config

EMBEDDING = "embed_tokens.weight", "embed_tokens.eoi_embedding"
UNUSED = frozenset({"lm_head.out_proj.weight", *(f"model.decoder.{name}" for name in EMBEDDING)})
"""Copies of the embedding."""
SIGHT = "encoder.vision_tower.", "encoder.multi_modal_projector."


def read_config(where: Path, content: dict[str, Any]) -> T5Gemma2Config:
    """The T5Gemma2Config of a config.json's content. Raises ValueError for what is not supported."""
    tied = content.get("tie_word_embeddings", True)
    if tied is not True:
        raise ValueError(
            f"{where}: tie_word_embeddings is {shown(tied)}; only true is supported: T5Gemma 2 has one "
            "embedding."
        )
    parts = {}
    for name in PARTS:
        part = content.get(name)
        inner = part.get("text_config") if isinstance(part, dict) and name == "encoder" else part
        if not isinstance(inner, dict):
            spelt = f"{name}.text_config" if isinstance(part, dict) else name
            raise ValueError(f"{where}: {spelt} is {shown(inner)}, not an object.")
        ends = {
            key: content[key]
            for key in ("eos_token_id", "bos_token_id", "pad_token_id")
            if name == "decoder" and content.get(key) is not None
        }
        parts[name] = decoder.read_config(
            Path(f"{where}: {name}"),
            {**inner, **ends, "tie_word_embeddings": True, "model_type": "gemma3_text"},
        )
    parts["encoder"] = dataclasses.replace(parts["encoder"], more_eos=())
    token = content.get("eoi_token_index")
    if token is None:
        token = content["encoder"].get("eoi_token_index", T5Gemma2Config.end_of_image)
    if type(token) is not int:
        raise ValueError(f"{where}: eoi_token_index is {shown(token)}, not a token's number.")
    config = T5Gemma2Config(**parts, end_of_image=token)
    check(where, config)
    return config


def check(where: Any, config: T5Gemma2Config) -> None:
    """Raises ValueError naming a value that no T5Gemma 2 can have."""
    check_fields(where, T5Gemma2Config, vars(config))
    for name in PARTS:
        part = getattr(config, name)
        decoder.check(f"{where}: {name}", part)
        for field, expected in (
            ("family", "gemma3_text"),
            ("tied_embeddings", True),
            ("attention_softcap", None),  # transformers reads it but does not apply it
        ):
            value = getattr(part, field)
            if value != expected:
                raise ValueError(f"{where}: {name}: {field} is {shown(value)}; only {expected} is supported.")
    for field in ("d_model", "vocab_size"):
        sizes = [getattr(part, field) for part in (config.encoder, config.decoder)]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"{where}: {decoder.SHARED[field]} is {sizes[0]} in the encoder and {sizes[1]} in the "
                "decoder, which share an embedding: it must be the same."
            )


def describe(config: T5Gemma2Config) -> dict[str, Any]:
    """The content of config.json. Raises ValueError for a model that T5Gemma 2's code cannot represent."""
    parts = {name: decoder.describe(getattr(config, name)) for name in PARTS}
    for name, kind in zip(PARTS, ("t5gemma2_text", "t5gemma2_decoder"), strict=True):
        del parts[name]["architectures"]
        parts[name]["model_type"] = kind
    return {
        "model_type": T5Gemma2Config.family,
        "architectures": ["T5Gemma2ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "encoder": {
            "model_type": "t5gemma2_encoder",
            "text_config": parts["encoder"],
            "eoi_token_index": config.end_of_image,
        },
        "decoder": parts["decoder"],
        "eoi_token_index": config.end_of_image,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": True,
        **{name: parts["decoder"][name] for name in ("pad_token_id", "eos_token_id", "bos_token_id")},
    }


def parameter_names(config: T5Gemma2Config) -> Iterator[tuple[tuple[Any, ...], str, bool]]:
    """(path in our parameters, Hugging Face's name, whether theirs is transposed) of every array."""
    for ours, theirs in zip(("embedding", "image_end"), EMBEDDING, strict=True):
        yield ("decoder", ours), f"model.encoder.text_model.{theirs}", False
    for name, where in zip(PARTS, ("encoder.text_model", "decoder"), strict=True):
        for path, theirs, transposed in decoder.parameter_names(getattr(config, name), NORMS):
            if path != ("embedding",):
                yield (name, *path), theirs.replace("model.", f"model.{where}.", 1), transposed


def canonical(name: str) -> str | None:
    """The name that parameter_names() gives an array of a folder, which may omit `model` and `text_model`;
    None for the vision parts."""
    inner = name.removeprefix("model.")
    if inner.startswith(SIGHT):
        return None
    if inner.startswith("encoder."):
        inner = f"encoder.text_model.{inner.removeprefix('encoder.').removeprefix('text_model.')}"
    return f"model.{inner}" if inner.startswith(PARTS) else name
