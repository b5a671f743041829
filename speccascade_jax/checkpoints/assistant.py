"""Gemma 4's assistants in Hugging Face folders, and with their verifiers in our format."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints import gemma4
from speccascade_jax.checkpoints.arrays import ParameterPath
from speccascade_jax.checkpoints.decoder import TEXT_PARTS
from speccascade_jax.checkpoints.fields import check_fields
from speccascade_jax.checkpoints.files import shown
from speccascade_jax.models.assistant import (
    ASSISTANT,
    AssistantConfig,
    AssistantModel,
    AssistedConfig,
    AssistedModel,
)
from speccascade_jax.models.gemma4 import Gemma4Config

CONFIG_NAMES = {
    "state_width": "backbone_hidden_size",
    "num_centroids": "num_centroids",
    "active_centroids": "centroid_intermediate_top_k",
}
EXTRA = (
    (("begin", "kernel"), "pre_projection.weight", True),
    (("end", "kernel"), "post_projection.weight", True),
)
ORDERED = (
    (("centroids", "kernel"), "masked_embedding.centroids.weight", True),
    (("order",), "masked_embedding.token_ordering", False),
)
ALIKE = (
    "vocab_size",
    "d_kv",
    "d_kv_global",
    "num_kv_heads",
    "num_kv_heads_global",
    "rope_theta",
    "local_rope_theta",
    "rope_share",
)
"""The fields that must be equal for an assistant and its verifier."""


def read_config(where: Path, content: dict[str, Any]) -> AssistantConfig:
    """The AssistantConfig of a config.json's content. Raises ValueError for what is not supported."""
    text = content.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"{where}: text_config is {shown(text)}, not an object.")
    usual = TEXT_PARTS["gemma4_unified"].usual if text.get("model_type") == "gemma4_unified_text" else {}
    ends = {
        name: content[name]
        for name in ("eos_token_id", "bos_token_id", "pad_token_id")
        if content.get(name) is not None
    }
    values = gemma4.values_of(Path(f"{where}: text_config"), {**usual, **text, **ends})
    values |= {ours: content[theirs] for ours, theirs in CONFIG_NAMES.items() if theirs in content}
    values["num_readers"] = values["num_layers"]
    if not content.get("use_ordered_embeddings", False):
        values |= {"num_centroids": None, "active_centroids": ASSISTANT.active_centroids}
    check_fields(where, AssistantConfig, values, gemma4.FIELDS | CONFIG_NAMES)
    config = AssistantConfig(**{**vars(gemma4.USUAL), **values})
    check(where, config)
    return config


def check(where: Any, config: AssistantConfig) -> None:
    """Raises ValueError naming a value that no assistant can have."""
    check_fields(where, AssistantConfig, dataclasses.asdict(config))
    c, wrong = config, gemma4.wrong_sizes(config)
    if c.num_writers:
        wrong.append(f"num_kv_shared_layers is {c.num_readers}, but all {c.num_layers} layers are shared")
    if c.per_layer_width is not None or c.wide_readers or not c.tied_embeddings:
        wrong.append(
            "an assistant has no inputs for single layers, no wide MLPs and no head besides its embedding"
        )
    if c.num_centroids is not None and (
        c.vocab_size % c.num_centroids or c.active_centroids > c.num_centroids
    ):
        wrong.append(
            f"{c.num_centroids} centroids, {c.active_centroids} of them active, do not divide "
            f"{c.vocab_size} tokens"
        )
    for sentence in wrong:
        raise ValueError(f"{where}: {sentence}.")


def describe(config: AssistantConfig) -> dict[str, Any]:
    """The content of config.json. Raises ValueError for an assistant that transformers cannot represent."""
    text = gemma4.described(config) | {"vocab_size_per_layer_input": 0}
    del text["architectures"]
    content = {
        "model_type": config.family,
        "architectures": ["Gemma4AssistantForCausalLM"],
        "text_config": text,
        "backbone_hidden_size": config.state_width,
        "use_ordered_embeddings": config.num_centroids is not None,
        "num_centroids": config.num_centroids or ASSISTANT.num_centroids,
        "centroid_intermediate_top_k": config.active_centroids,
        "tie_word_embeddings": True,
    }
    gemma4.check_same(config, read_config(Path("config.json"), content))
    return content


def parameter_names(config: AssistantConfig) -> Iterator[tuple[ParameterPath, str, bool]]:
    """(path in our parameters, Hugging Face's name, whether theirs is transposed) of every array."""
    yield from gemma4.parameter_names(config)
    yield from EXTRA
    if config.num_centroids is not None:
        yield from ORDERED


def joined(where: Any, drafter: AssistantModel, verifier: Any) -> AssistedModel:
    """The network of a verifier and the assistant from the folder `where`. Raises ValueError for an assistant
    of another verifier."""
    check_pair(where, drafter.config, verifier.config)
    return AssistedModel(
        AssistedConfig(verifier.config, drafter.config),
        verifier.dtype,
        verifier.cache_dtype,
        verifier.remat,
        verifier.stacked,
        verifier.chunk,
    )


def check_assisted(where: Any, config: AssistedConfig) -> None:
    """Raises ValueError naming a field in which an assistant does not match its verifier."""
    check_fields(where, AssistedConfig, vars(config))
    gemma4.check(f"{where}: verifier", config.verifier)
    check(f"{where}: drafter", config.drafter)
    check_pair(where, config.drafter, config.verifier)


def check_pair(where: Any, drafter: AssistantConfig, verifier: Gemma4Config) -> None:
    """Raises ValueError naming the first size in which an assistant does not match a verifier."""
    pairs = [("state_width", drafter.state_width, verifier.d_model)]
    pairs += [(name, getattr(drafter, name), getattr(verifier, name)) for name in ALIKE]
    names = gemma4.FIELDS | CONFIG_NAMES
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise ValueError(
                f"{where} is the assistant of another verifier: its {names.get(name, name)} is {ours}, the "
                f"verifier has {theirs}."
            )
    kinds = set(map(drafter.is_local, range(drafter.num_layers)))
    if not kinds <= set(map(verifier.is_local, range(verifier.num_writers))):
        raise ValueError(f"{where} is the assistant of another verifier: this one has no local layers.")


def assisted_names(config: AssistedConfig) -> Iterator[tuple[ParameterPath, str, bool]]:
    """(path in our parameters, a name, False) of every array."""
    for name, part in (("verifier", gemma4.parameter_names), ("drafter", parameter_names)):
        for path, _, _ in part(getattr(config, name)):
            yield (name, *path), ".".join(map(str, (name, *path))), False
