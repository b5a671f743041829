"""DFlash's block drafters in Hugging Face folders, and with their verifiers in our format.

A folder's config.json is that of a Qwen 3 with an object `dflash_config` and the address of code that
transformers would run. This module never runs that code.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints import decoder
from speccascade_jax.checkpoints.arrays import ParameterPath
from speccascade_jax.checkpoints.fields import check_fields
from speccascade_jax.checkpoints.files import shown
from speccascade_jax.models.decoder import DecoderConfig
from speccascade_jax.models.dflash import (
    DFLASH,
    DFlashConfig,
    DFlashModel,
    DFlashPairConfig,
    DFlashPairModel,
)

WITHIN = "dflash_config"
LAYERS = "target_layer_ids"  # each entry names a layer's output
CONFIG_NAMES = {"mask_id": "mask_token_id", "block_size": "block_size"}
ARCHITECTURE = "DFlashDraftModel"
ONLY = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}
"""Fields that the authors' other drafters change, and their neutral values."""


def as_drafter(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json, with our model_type if it is a DFlash drafter."""
    return {**content, "model_type": DFLASH.family, "layer": content} if WITHIN in content else content


def read_config(where: Path, content: dict[str, Any]) -> DFlashConfig:
    """The DFlashConfig of as_drafter()'s content. Raises ValueError for what is not supported."""
    layer, inner = content.get("layer", content), content[WITHIN]
    if not isinstance(inner, dict):
        raise ValueError(f"{where}: {WITHIN} is {shown(inner)}, not an object.")
    if layer.get("model_type") != "qwen3" or layer.get("architectures", [ARCHITECTURE]) != [ARCHITECTURE]:
        raise ValueError(
            f"{where}: the drafter is a {shown(layer.get('architectures'))} with layers of "
            f"{shown(layer.get('model_type'))}; only {ARCHITECTURE} with layers of qwen3 is supported."
        )
    values = {**layer, **inner}
    for name, usual in ONLY.items():
        if values.get(name) not in (usual, None):
            raise ValueError(f"{where}: {name} is {shown(values[name])}; only {usual:g} is supported.")
    if values.get("is_causal") not in (False, None):
        raise ValueError(f"{where}: is_causal is {shown(values['is_causal'])}; only false is supported.")
    for name in (LAYERS, *CONFIG_NAMES.values()):
        if name not in values:
            raise ValueError(f"{where}: {name} is missing: this is not a drafter's config.json.")
    named = values[LAYERS]
    if not isinstance(named, list) or any(type(number) is not int for number in named):
        raise ValueError(f"{where}: {LAYERS} is {shown(named)}, not a list of layers.")
    plain = decoder.read_config(where, {**layer, "tie_word_embeddings": False})
    fields = {name: value for name, value in vars(plain).items() if name != "family"}
    fields |= {ours: values[theirs] for ours, theirs in CONFIG_NAMES.items()}
    fields["states"] = tuple(number + 1 for number in named)
    check_fields(where, DFlashConfig, fields, decoder.SHARED | CONFIG_NAMES | {"states": LAYERS})
    config = DFlashConfig(**fields)
    check(where, config)
    return config


def check(where: Any, config: DFlashConfig) -> None:
    """Raises ValueError naming a value that no drafter can have."""
    check_fields(where, DFlashConfig, dataclasses.asdict(config))
    decoder.check(where, as_decoder(config))
    c, wrong = config, list[str]()
    if c.local or not c.head_norms or c.post_norms or c.unit_offset or c.tied_embeddings or c.more_eos:
        wrong.append("a drafter's layers are those of a Qwen 3, without windows")
    if not c.states or list(c.states) != sorted(set(c.states)):
        wrong.append(f"{LAYERS} is {shown([n - 1 for n in c.states])}, not layers from the lowest up")
    if c.block_size < 2:
        wrong.append(f"block_size is {c.block_size}: it is at least 2, the committed token and a draft")
    for sentence in wrong:
        raise ValueError(f"{where}: {sentence}.")


def as_decoder(config: DFlashConfig) -> DecoderConfig:
    """The config of a decoder with such layers."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(DecoderConfig)}
    return DecoderConfig(**values | {"family": "qwen3"})


def describe(config: DFlashConfig) -> dict[str, Any]:
    """The content of config.json."""
    inner = {CONFIG_NAMES["mask_id"]: config.mask_id, LAYERS: [number - 1 for number in config.states]}
    return decoder.describe(as_decoder(config)) | {
        "architectures": [ARCHITECTURE],
        CONFIG_NAMES["block_size"]: config.block_size,
        WITHIN: inner,
    }


def parameter_names(config: DFlashConfig) -> Iterator[tuple[ParameterPath, str, bool]]:
    """(path in our parameters, their name, whether theirs is transposed) of every array."""
    yield ("mix", "kernel"), "fc.weight", True
    yield ("mix_norm", "scale"), "hidden_norm.weight", False
    yield ("norm", "scale"), "norm.weight", False
    for path, name, transposed in decoder.parameter_names(as_decoder(config)):
        if path[0] == "layers":
            yield path, name.removeprefix("model."), transposed


def canonical(name: str) -> str:
    """The name that parameter_names() gives an array of a folder."""
    return name.removeprefix("model.")


def joined(where: Any, drafter: DFlashModel, verifier: Any) -> DFlashPairModel:
    """The network of a verifier and the drafter from the folder `where`. Raises ValueError for a drafter of
    another verifier."""
    check_pair(where, drafter.config, verifier.config)
    return DFlashPairModel(
        DFlashPairConfig(verifier.config, drafter.config),
        verifier.dtype,
        verifier.cache_dtype,
        verifier.remat,
        verifier.stacked,
        chunk=verifier.chunk,
    )


def check_config(where: Any, config: DFlashPairConfig) -> None:
    """Raises ValueError naming a value that no verifier and its drafter can have."""
    check_fields(where, DFlashPairConfig, vars(config))
    decoder.check(f"{where}: verifier", config.verifier)
    check(f"{where}: drafter", config.drafter)
    check_pair(where, config.drafter, config.verifier)


def check_pair(where: Any, drafter: DFlashConfig, verifier: DecoderConfig) -> None:
    """Raises ValueError naming a field in which a drafter does not match a verifier."""
    another = f"{where} is the drafter of another verifier:"
    for name in ("vocab_size", "d_model"):
        ours, theirs = getattr(drafter, name), getattr(verifier, name)
        if ours != theirs:
            raise ValueError(f"{another} its {decoder.SHARED[name]} is {ours}, the verifier has {theirs}.")
    if drafter.states[-1] >= verifier.num_layers:  # the last layer's output is only available after a norm
        raise ValueError(
            f"{another} {LAYERS} is {shown([n - 1 for n in drafter.states])}, the verifier has "
            f"{verifier.num_layers} layers."
        )


def pair_names(config: DFlashPairConfig) -> Iterator[tuple[ParameterPath, str, bool]]:
    """(path in our parameters, a name, False) of every array."""
    for name, part in (("verifier", decoder.parameter_names), ("drafter", parameter_names)):
        for path, _, _ in part(getattr(config, name)):
            yield (name, *path), ".".join(map(str, (name, *path))), False
