"""The text model of Gemma 4 in Hugging Face folders: config.json and the names of the arrays.

Folders of multimodal models (`gemma4`, `gemma4_unified`) contain it as a part.
"""

import dataclasses
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints.decoder import (
    EVERYTHING,
    FOUR_NORMS,
    LOCAL,
    SIZES,
    ends_of,
    repeated,
)
from speccascade_jax.checkpoints.fields import MOST_LAYERS, check_fields
from speccascade_jax.checkpoints.files import shown
from speccascade_jax.models.decoder import ACTIVATIONS
from speccascade_jax.models.gemma4 import GEMMA4, Gemma4Config, sections

FIELDS = SIZES | {
    "vocab_size": "vocab_size",
    "d_kv": "head_dim",
    "d_kv_global": "global_head_dim",
    "num_kv_heads": "num_key_value_heads",
    "num_kv_heads_global": "num_global_key_value_heads",
    "num_readers": "num_kv_shared_layers",
    "wide_readers": "use_double_wide_mlp",
    "keys_are_values": "attention_k_eq_v",
    "attention_bias": "attention_bias",
    "per_layer_width": "hidden_size_per_layer_input",
    "activation": "hidden_activation",
    "tied_embeddings": "tie_word_embeddings",
    "logit_softcap": "final_logit_softcapping",
    "window": "sliding_window",
    "max_positions": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "pad_id": "pad_token_id",
    "eos_id": "eos_token_id",
    "bos_id": "bos_token_id",
}
USUAL = dataclasses.replace(
    GEMMA4,
    num_kv_heads=4,
    num_readers=None,
    wide_readers=False,
    logit_softcap=None,
    local=(1, 1, 1, 1, 1, 0),
)
"""The fields that config.json omits."""
PER_LAYER = "per_layer_config"
OTHER_SENSES = "vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder."


def read_config(where: Path, content: dict[str, Any]) -> Gemma4Config:
    """The Gemma4Config of a config.json's content. Raises ValueError for what is not supported."""
    config = dataclasses.replace(USUAL, **values_of(where, content))
    table = content.get("vocab_size_per_layer_input", config.vocab_size)
    if config.per_layer_width is not None and table != config.vocab_size:
        raise ValueError(
            f"{where}: vocab_size_per_layer_input is {shown(table)}, not {config.vocab_size}, as vocab_size: "
            "each token needs an input for each layer."
        )
    check(where, config)
    return config


def values_of(where: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Gemma4Config that a config.json's content gives. Raises ValueError for what is not
    supported."""
    if content.get("enable_moe_block"):
        raise ValueError(
            f"{where}: enable_moe_block is true: a Gemma 4 with experts is not supported, "
            "but E2B, E4B and 31B are."
        )
    if content.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ValueError(
            f"{where}: use_bidirectional_attention is {shown(content['use_bidirectional_attention'])}: "
            "a model that reads ahead cannot write texts."
        )
    for theirs in SIZES.values():
        if theirs not in content:
            raise ValueError(
                f"{where}: {theirs} is missing: this is not a model's config.json, or it is damaged."
            )
    values = {ours: content[theirs] for ours, theirs in FIELDS.items() if theirs in content}
    for name in ("num_readers", "per_layer_width"):
        values[name] = values.get(name, getattr(USUAL, name)) or None
    values |= ends_of(values) | rope_of(where, content)
    values.setdefault("num_kv_heads", USUAL.num_kv_heads)
    if not values.get("keys_are_values") or values.get("num_kv_heads_global") is None:
        values["num_kv_heads_global"] = values["num_kv_heads"]
    check_fields(where, Gemma4Config, values, FIELDS, usual=USUAL)
    kinds = kinds_of(where, content, values["num_layers"])
    values["local"] = repeated(kinds, USUAL.local)
    if content.get(PER_LAYER) is not None:
        values |= of_global_layers(where, content[PER_LAYER], kinds, values)
    check_fields(where, Gemma4Config, values, FIELDS, usual=USUAL)
    return values


def rope_of(where: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The fields for rotary positions."""
    parts = content.get("rope_parameters") or {}
    full, local = (parts.get(kind) or {} if isinstance(parts, dict) else None for kind in (EVERYTHING, LOCAL))
    if not isinstance(full, dict) or not isinstance(local, dict):
        raise ValueError(f"{where}: rope_parameters is {shown(parts)}, not an object for each kind of layer.")
    for kind, part, expected in ((EVERYTHING, full, "proportional"), (LOCAL, local, "default")):
        if part.get("rope_type", expected) != expected or part.get("factor", 1) != 1:
            raise ValueError(
                f"{where}: rope_parameters of {kind} is {shown(part)}; only {expected}, without a factor, is "
                "supported."
            )
    share = full.get("partial_rotary_factor", 1.0 if full else USUAL.rope_share)
    return {
        "rope_theta": full.get("rope_theta", USUAL.rope_theta),
        "local_rope_theta": local.get("rope_theta", USUAL.local_rope_theta),
        "rope_share": share,
    }


def kinds_of(where: Path, content: dict[str, Any], layers: int) -> list[int]:
    """For each layer, whether it is local. The last layer is always global."""
    types = content.get("layer_types")
    if types is None:
        types = [LOCAL if USUAL.is_local(layer) else EVERYTHING for layer in range(layers)]
    if not isinstance(types, list) or any(kind not in (LOCAL, EVERYTHING) for kind in types):
        raise ValueError(f"{where}: layer_types is {shown(types)}, not a list of {LOCAL} and {EVERYTHING}.")
    if len(types) != layers:
        raise ValueError(f"{where}: layer_types names {len(types)} layers, num_hidden_layers is {layers}.")
    return [*(int(kind == LOCAL) for kind in types[:-1]), 0]


def of_global_layers(where: Path, overrides: Any, kinds: list[int], values: dict[str, Any]) -> dict[str, Any]:
    """The sizes of global layers if config.json has fields for single layers, as transformers writes it since
    5.23: under the layers' zero-padded numbers."""
    names = {
        "head_dim": ("d_kv", "d_kv_global"),
        "num_key_value_heads": ("num_kv_heads", "num_kv_heads_global"),
    }
    if not isinstance(overrides, dict) or not all(isinstance(x, dict) for x in overrides.values()):
        raise ValueError(f"{where}: {PER_LAYER} is {shown(overrides)}, not an object of objects.")
    by_number = {int(number): layer for number, layer in overrides.items() if number.isdecimal()}
    layers = [by_number.get(number, {}) for number in range(len(kinds))]
    widths: dict[str, Any] = {}
    for theirs, (usual, of_global) in names.items():
        base = values.get(usual, getattr(USUAL, usual))
        sizes = [layer.get(theirs, base) for layer in layers]
        widths[of_global] = sizes[-1]
        if any(size != (base if local else sizes[-1]) for size, local in zip(sizes, kinds, strict=True)):
            raise ValueError(
                f"{where}: {PER_LAYER} gives {theirs} {shown(sizes)}: it may differ between {LOCAL} and "
                f"{EVERYTHING} only."
            )
    unknown = sorted({name for layer in overrides.values() for name in layer} - names.keys())
    if unknown or len(by_number) < len(overrides) or not by_number.keys() <= set(range(len(kinds))):
        raise ValueError(
            f"{where}: {PER_LAYER} is {shown(overrides)}; only {', '.join(names)} are supported."
        )
    return widths


def check(where: Any, config: Gemma4Config) -> None:
    """Raises ValueError naming a value that no Gemma 4 can have."""
    check_fields(where, Gemma4Config, dataclasses.asdict(config))
    c, wrong = config, wrong_sizes(config)
    if c.num_writers < 1:
        wrong.append(
            f"num_kv_shared_layers is {c.num_readers}, but there are {c.num_layers} layers: one at least has "
            "keys and values"
        )
    elif not set(map(c.is_local, range(c.num_layers))) <= set(map(c.is_local, range(c.num_writers))):
        wrong.append(
            f"num_kv_shared_layers is {c.num_readers}: no layer before those has keys and values of "
            "their kind"
        )
    for sentence in wrong:
        raise ValueError(f"{where}: {sentence}.")


def wrong_sizes(config: Gemma4Config) -> list[str]:
    """Describes sizes that neither a Gemma 4 nor an assistant can have."""
    c, wrong = config, list[str]()
    for heads in (c.num_kv_heads, c.num_kv_heads_global):
        if c.num_heads % heads:
            wrong.append(
                f"{c.num_heads} attention heads cannot share {heads} heads of keys and values: the second "
                "number divides the first"
            )
    for width in (c.d_kv, c.d_kv_global):
        if width % 2:
            wrong.append(f"a head's width is {width}, but rotary positions turn pairs: it is even")
    if c.activation not in ACTIVATIONS:
        wrong.append(f"the activation is {shown(c.activation)}; known: {', '.join(ACTIVATIONS)}")
    if c.rope_share > 1:
        wrong.append(f"partial_rotary_factor is {c.rope_share}: it is at most 1")
    if not set(c.local) <= {0, 1} or len(c.local) > MOST_LAYERS:
        wrong.append(f"local is {shown(c.local)}, not a list of 0 and 1")
    elif c.is_local(c.num_layers - 1):
        wrong.append("the last layer is local, but Gemma 4 ends with a global one")
    if any(not 0 <= token < c.vocab_size for token in c.more_eos):
        wrong.append(f"eos_token_id names {shown(c.more_eos)}, which are no tokens")
    return wrong


def parameter_names(config: Gemma4Config) -> Iterator[tuple[tuple[Any, ...], str, bool]]:
    """(path in our parameters, Hugging Face's name, whether theirs is transposed) of every array."""
    yield ("embedding",), "model.embed_tokens.weight", False
    yield ("norm", "scale"), "model.norm.weight", False
    if not config.tied_embeddings:
        yield ("head", "kernel"), "lm_head.weight", True
    if config.per_layer_width is not None:
        yield ("per_layer", "embedding"), "model.embed_tokens_per_layer.weight", False
        yield ("per_layer", "projection", "kernel"), "model.per_layer_model_projection.weight", True
        yield ("per_layer", "norm", "scale"), "model.per_layer_projection_norm.weight", False
    for section in sections(config):
        for n in range(section.size * section.groups):
            layer = section.name, n // section.size, "layers", n % section.size
            for path, name, transposed in layer_names(config, section.first + n):
                yield (*layer, *path), f"model.layers.{section.first + n}.{name}", transposed


def layer_names(config: Gemma4Config, number: int) -> Iterator[tuple[tuple[Any, ...], str, bool]]:
    """parameter_names() within a layer."""
    yield ("scalar",), "layer_scalar", False
    norms: list[tuple[tuple[str, ...], str]] = [
        *(((ours,), theirs) for ours, theirs in FOUR_NORMS.items()),
        (("attention", "query_norm"), "self_attn.q_norm"),
    ]
    kernels: list[tuple[tuple[str, ...], str]] = [
        (("attention", "query"), "self_attn.q_proj"),
        (("attention", "out"), "self_attn.o_proj"),
        *((("mlp", name), f"mlp.{name}_proj") for name in ("gate", "up", "down")),
    ]
    if number < config.num_writers:
        norms.append((("attention", "key_norm"), "self_attn.k_norm"))
        kernels.append((("attention", "key"), "self_attn.k_proj"))
        if config.is_local(number) or not config.keys_are_values:
            kernels.append((("attention", "value"), "self_attn.v_proj"))
    if config.per_layer_width is not None:
        norms.append((("input", "norm"), "post_per_layer_input_norm"))
        kernels.append((("input", "narrow"), "per_layer_input_gate"))
        kernels.append((("input", "widen"), "per_layer_projection"))
    yield from (((*ours, "scale"), f"{theirs}.weight", False) for ours, theirs in norms)
    for ours, theirs in kernels:
        yield (*ours, "kernel"), f"{theirs}.weight", True
        if config.attention_bias and ours[0] == "attention":
            yield (*ours, "bias"), f"{theirs}.bias", False


def unused(config: Gemma4Config) -> Set[str]:
    """Arrays that may be present but are not read: the key and value projections of layers that reuse those
    of others."""
    readers = range(config.num_writers, config.num_layers)
    names = "k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias", "k_norm.weight"
    return {"lm_head.weight"} | {f"model.layers.{n}.self_attn.{name}" for n in readers for name in names}


def canonical(name: str) -> str | None:
    """The name that parameter_names() gives an array of a folder; None for those of other modalities."""
    inner = name.removeprefix("model.")
    if inner.startswith(OTHER_SENSES):
        return None
    return f"model.{inner.removeprefix('language_model.')}" if inner.startswith("language_model.") else name


def describe(config: Gemma4Config) -> dict[str, Any]:
    """The content of config.json. Raises ValueError for a model that Gemma 4's code cannot represent."""
    content = described(config)
    check_same(config, read_config(Path("config.json"), content))
    return content


def described(config: Gemma4Config) -> dict[str, Any]:
    """The content of config.json, without checking that Gemma 4's code can represent it."""
    content = {theirs: getattr(config, ours) for ours, theirs in FIELDS.items()}
    content |= {
        "model_type": Gemma4Config.family,
        "architectures": ["Gemma4ForCausalLM"],
        "num_kv_shared_layers": config.num_readers or 0,
        "hidden_size_per_layer_input": config.per_layer_width or 0,
        "vocab_size_per_layer_input": config.vocab_size,
        "layer_types": [LOCAL if config.is_local(n) else EVERYTHING for n in range(config.num_layers)],
        "rope_parameters": {
            EVERYTHING: {
                "rope_type": "proportional",
                "partial_rotary_factor": config.rope_share,
                "rope_theta": config.rope_theta,
            },
            LOCAL: {"rope_type": "default", "rope_theta": config.local_rope_theta},
        },
    }
    if config.more_eos:
        content["eos_token_id"] = [config.eos_id, *config.more_eos]
    return content


def check_same(config: Gemma4Config, again: Gemma4Config) -> None:
    """Raises ValueError naming a field whose value changes in a round trip through config.json."""
    for name, value in vars(config).items():
        if vars(again)[name] != value:
            raise ValueError(
                f"{name} is {shown(value)}, and Hugging Face's {config.family} is only ever "
                f"{shown(vars(again)[name])}: export it natively."
            )
