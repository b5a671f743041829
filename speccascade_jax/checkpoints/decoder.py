"""Decoder-only families in Hugging Face folders: config.json and the names of the arrays.

DECODER_SPELLINGS is their table. It reads config.json files of transformers 4 and 5, and writes files that
both read.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from speccascade_jax.checkpoints.fields import MOST_LAYERS, check_fields
from speccascade_jax.checkpoints.files import shown
from speccascade_jax.models import presets, rope
from speccascade_jax.models.decoder import ACTIVATIONS, DecoderConfig

LOCAL, EVERYTHING = "sliding_attention", "full_attention"
SIZES = {
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
SHARED = SIZES | {
    "vocab_size": "vocab_size",
    "d_kv": "head_dim",
    "num_kv_heads": "num_key_value_heads",
    "tied_embeddings": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "pad_id": "pad_token_id",
    "eos_id": "eos_token_id",
    "bos_id": "bos_token_id",
}
HIDDEN_ACT, BIAS = {"activation": "hidden_act"}, {"query_bias": "attention_bias"}
OF_GEMMA = BIAS | {
    "activation": "hidden_activation",
    "query_scalar": "query_pre_attn_scalar",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}
ROPE = {"rope_factor": "factor", "rope_length": "original_max_position_embeddings"}
STRETCHED = {
    "default": {},
    "linear": {"rope_factor": "factor"},
    "dynamic": {"rope_factor": "factor"},
    "llama3": ROPE | {"rope_low": "low_freq_factor", "rope_high": "high_freq_factor"},
    "yarn": ROPE
    | {
        "rope_low": "beta_slow",
        "rope_high": "beta_fast",
        "rope_attention": "attention_factor",
        "rope_truncate": "truncate",
    },
}
"""The fields of rope_parameters (formerly rope_scaling) for each type."""
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
FOUR_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


class Spelling(NamedTuple):
    """The names and layout of a family's checkpoints."""

    usual: DecoderConfig  # values that config.json omits or the family's code fixes
    architecture: str
    fields: dict[str, str]  # further fields of ours -> those of config.json
    norms: Mapping[str, str]  # a layer's norms -> their names for them
    windows: str = ""  # field besides layer_types that says which layers are local; sliding_window: all
    derives: bool = False  # default head_dim is hidden_size / heads, and each head has its own key and value


DECODER_SPELLINGS = {
    row.usual.family: row
    for row in (
        Spelling(
            presets.LLAMA,
            "LlamaForCausalLM",
            HIDDEN_ACT | BIAS | {"mlp_bias": "mlp_bias"},
            NORMS,
            derives=True,
        ),
        Spelling(presets.MISTRAL, "MistralForCausalLM", HIDDEN_ACT, NORMS, "sliding_window", derives=True),
        Spelling(presets.QWEN2, "Qwen2ForCausalLM", HIDDEN_ACT, NORMS, "max_window_layers", derives=True),
        Spelling(presets.QWEN3, "Qwen3ForCausalLM", HIDDEN_ACT | BIAS, NORMS, "max_window_layers"),
        Spelling(presets.GEMMA2, "Gemma2ForCausalLM", OF_GEMMA, FOUR_NORMS, "layer_types"),
        Spelling(presets.GEMMA3, "Gemma3ForCausalLM", OF_GEMMA, FOUR_NORMS, "sliding_window_pattern"),
    )
}


def read_config(where: Path, content: dict[str, Any]) -> DecoderConfig:
    """The DecoderConfig of a config.json's content. Raises ValueError for what its family does not
    support."""
    spelling = DECODER_SPELLINGS[content["model_type"]]
    usual, fields = spelling.usual, SHARED | spelling.fields
    for name, expected in (("use_bidirectional_attention", False), ("partial_rotary_factor", 1)):
        if content.get(name) not in (expected, None):
            raise ValueError(f"{where}: {name} is {shown(content[name])}; only {expected} is supported.")
    for theirs in SIZES.values():
        if theirs not in content:
            raise ValueError(
                f"{where}: {theirs} is missing: this is not a model's config.json, or it is damaged."
            )
    values: dict[str, Any] = {ours: content[theirs] for ours, theirs in fields.items() if theirs in content}
    values["family"] = usual.family
    values |= ends_of(values)
    if spelling.derives and values.get("num_kv_heads") is None:
        values["num_kv_heads"] = values["num_heads"]
    if spelling.derives and values.get("d_kv") is None:
        heads, width = values["num_heads"], values["d_model"]
        whole = all(type(size) is int for size in (heads, width)) and heads > 0
        values["d_kv"] = width // heads if whole else usual.d_kv  # otherwise the check below reports it
    if "query_bias" in values:
        values["output_bias"] = values["query_bias"]
    values |= rope_of(where, content, usual)
    names = fields | ROPE | {"window": "sliding_window"} | STRETCHED.get(values["rope_type"], {})
    check_fields(where, DecoderConfig, values, names, usual=usual)
    if values.get("activation", usual.activation) not in ACTIVATIONS:
        raise ValueError(
            f"{where}: {fields['activation']} is {shown(values['activation'])}; known: "
            f"{', '.join(ACTIVATIONS)}."
        )
    values |= windows_of(where, content, spelling, values["num_layers"])
    check_fields(where, DecoderConfig, values, names, usual=usual)
    config = dataclasses.replace(usual, **values)
    check(where, config)
    return config


def ends_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens. If several end a text, the first is eos_id. Missing ones are replaced by eos_id."""
    eos = values.get("eos_id")
    first, *more = eos if isinstance(eos, list) and eos else [eos]
    ends = {"eos_id": first, "more_eos": tuple(more)} if "eos_id" in values else {}
    missing = {name: first for name in ("pad_id", "bos_id") if name in values and values[name] is None}
    return ends | missing


def rope_of(where: Path, content: dict[str, Any], usual: DecoderConfig) -> dict[str, Any]:
    """The fields for rotary positions, from rope_parameters (transformers 5), which may differ between
    layers, or from rope_theta, rope_scaling and rope_local_base_freq."""
    objects: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        if content.get(name) is not None:
            objects[name] = content[name]
            if not isinstance(objects[name], dict):
                raise ValueError(f"{where}: {name} is {shown(objects[name])}, not an object.")
    full: Any = dict(objects.get("rope_parameters", {}))
    local: Any = {}
    if {EVERYTHING, LOCAL} & full.keys():
        full, local = (full.get(kind) or {} for kind in (EVERYTHING, LOCAL))
        if not (isinstance(full, dict) and isinstance(local, dict)):
            raise ValueError(
                f"{where}: rope_parameters holds {shown(objects['rope_parameters'])}, not objects."
            )
    scaling = objects.get("rope_scaling", {})
    if scaling and not {"rope_type", "type"} & scaling.keys():
        raise ValueError(f"{where}: rope_scaling is {shown(scaling)} and names no rope_type.")
    full = {**full, **scaling}
    kind = full.get("rope_type", full.get("type", "default"))
    if kind not in rope.TYPES:
        raise ValueError(f"{where}: rope_type is {shown(kind)}; known: {', '.join(rope.TYPES)}.")
    if full.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"{where}: partial_rotary_factor is {shown(full['partial_rotary_factor'])}; only 1 is supported."
        )
    theta = content.get("rope_theta", usual.rope_theta)
    values = {"rope_type": kind, "rope_theta": full.get("rope_theta", theta)}
    if usual.local_rope_theta is not None:
        values["local_rope_theta"] = local.get(
            "rope_theta", content.get("rope_local_base_freq", usual.local_rope_theta)
        )
        local = {**local, "rope_theta": None}
    elif local and local != full:
        raise ValueError(f"{where}: rope_parameters differs between layers, which {usual.family} cannot.")
    if local.get("rope_type", "default") != "default" and usual.local_rope_theta is not None:
        raise ValueError(
            f"{where}: rope_type of {LOCAL} is {shown(local['rope_type'])}; only default is supported."
        )
    for ours, theirs in STRETCHED[kind].items():
        if full.get(theirs) is not None:
            values[ours] = full[theirs]
        elif theirs in ("factor", "low_freq_factor", "high_freq_factor"):
            raise ValueError(f"{where}: {theirs} is missing, which rope_type {kind} needs.")
        elif theirs == "beta_fast":
            values[ours] = 32.0
    if kind == "yarn" and full.get("attention_factor") is None and isinstance(full["factor"], int | float):
        values["rope_attention"] = rope.attention_scale(
            full["factor"], full.get("mscale"), full.get("mscale_all_dim")
        )
    return values


def windows_of(where: Path, content: dict[str, Any], spelling: Spelling, layers: int) -> dict[str, Any]:
    """The attention window of each layer."""
    usual = spelling.usual
    window, types = content.get("sliding_window", usual.window), content.get("layer_types")
    if not spelling.windows or (
        spelling.windows == "max_window_layers" and content.get("use_sliding_window", False) is not True
    ):
        window = None
    pattern = content.get("sliding_window_pattern", content.get("_sliding_window_pattern"))
    begins = content.get("max_window_layers", 28)
    if types is not None:
        if not isinstance(types, list) or any(kind not in (LOCAL, EVERYTHING) for kind in types):
            raise ValueError(
                f"{where}: layer_types is {shown(types)}, not a list of {LOCAL} and {EVERYTHING}."
            )
        if len(types) != layers:
            raise ValueError(
                f"{where}: layer_types names {len(types)} layers, num_hidden_layers is {layers}."
            )
        local = [int(kind == LOCAL) for kind in types]
    elif spelling.windows == "max_window_layers":
        if type(begins) is not int:
            raise ValueError(f"{where}: max_window_layers is {shown(begins)}, not a whole number.")
        local = [int(n >= begins) for n in range(layers)]
    elif spelling.windows == "sliding_window_pattern" and pattern is not None:
        if type(pattern) is not int or pattern < 1:
            raise ValueError(f"{where}: sliding_window_pattern is {shown(pattern)}, not a number of layers.")
        local = [int((n + 1) % pattern != 0) for n in range(layers)]
    else:
        local = [usual.local[n % len(usual.local)] if usual.local else 0 for n in range(layers)]
    if window is None and spelling.windows in ("", "sliding_window", "max_window_layers"):
        local = []
    return {"window": window if any(local) else None, "local": repeated(local, usual.local)}


def repeated(local: list[int], usual: tuple[int, ...]) -> tuple[int, ...]:
    """The usual pattern if it gives these layers, otherwise the shortest that does."""
    if not any(local):
        return ()
    for pattern in (usual, *(tuple(local[:size]) for size in range(1, len(local) + 1))):
        if pattern and all(flag == pattern[n % len(pattern)] for n, flag in enumerate(local)):
            return pattern
    raise AssertionError("the whole list gives itself")


def check(where: Any, config: DecoderConfig) -> None:
    """Raises ValueError naming a value that no model of these families can have."""
    check_fields(where, DecoderConfig, dataclasses.asdict(config))
    wrong: list[str] = []
    if config.family not in DECODER_SPELLINGS:
        wrong.append(f"family is {shown(config.family)}, not one of {', '.join(DECODER_SPELLINGS)}")
    if config.num_heads % config.num_kv_heads:
        wrong.append(
            f"{config.num_heads} attention heads cannot share {config.num_kv_heads} heads of keys "
            f"and "
            "values: the second number divides the first"
        )
    least = 4 if config.rope_type == "dynamic" else 2
    if config.d_kv % 2 or config.d_kv < least:
        wrong.append(
            f"a head's width is {config.d_kv}, but rotary positions turn pairs: it is even, and at "
            f"least {least}"
        )
    if config.activation not in ACTIVATIONS:
        wrong.append(f"the activation is {shown(config.activation)}; known: {', '.join(ACTIVATIONS)}")
    if config.rope_type not in rope.TYPES:
        wrong.append(f"rope_type is {shown(config.rope_type)}; known: {', '.join(rope.TYPES)}")
    if config.rope_factor < 1:
        wrong.append(f"the rotary positions' factor is {config.rope_factor}: it is at least 1")
    if not config.rope_low < config.rope_high:
        wrong.append(
            f"the rotary positions' low factor is {config.rope_low}, not below the high one, "
            f"{config.rope_high}"
        )
    if config.rope_type == "yarn" and config.rope_theta <= 1:
        wrong.append(f"rope_theta is {config.rope_theta}: yarn needs one above 1")
    if not set(config.local) <= {0, 1} or len(config.local) > MOST_LAYERS:
        wrong.append(f"local is {shown(config.local)}, not a list of 0 and 1")
    if any(config.local) and config.window is None:
        wrong.append("sliding_window is None, but there are local layers")
    if any(not 0 <= token < config.vocab_size for token in config.more_eos):
        wrong.append(f"eos_token_id names {shown(config.more_eos)}, which are no tokens")
    for sentence in wrong:
        raise ValueError(f"{where}: {sentence}.")


def parameter_names(
    config: DecoderConfig, names: Mapping[str, str] | None = None
) -> Iterator[tuple[tuple[Any, ...], str, bool]]:
    """(path in our parameters, Hugging Face's name, whether theirs is transposed) of every array. `names`
    replaces the family's names of a layer's norms."""
    yield ("embedding",), "model.embed_tokens.weight", False
    yield ("norm", "scale"), "model.norm.weight", False
    if not config.tied_embeddings:
        yield ("head", "kernel"), "lm_head.weight", True
    inner = [
        (("attention", "query"), "self_attn.q_proj", config.query_bias),
        (("attention", "key"), "self_attn.k_proj", config.query_bias),
        (("attention", "value"), "self_attn.v_proj", config.query_bias),
        (("attention", "out"), "self_attn.o_proj", config.output_bias),
        *((("mlp", name), f"mlp.{name}_proj", config.mlp_bias) for name in ("gate", "up", "down")),
    ]
    norms = [
        *(((ours,), theirs) for ours, theirs in (names or DECODER_SPELLINGS[config.family].norms).items()),
        *[(("attention", "query_norm"), "self_attn.q_norm"), (("attention", "key_norm"), "self_attn.k_norm")]
        * config.head_norms,
    ]
    for n in range(config.num_layers):
        layer, base = ("layers", n), f"model.layers.{n}"
        yield from (((*layer, *ours, "scale"), f"{base}.{theirs}.weight", False) for ours, theirs in norms)
        for ours, theirs, bias in inner:
            yield (*layer, *ours, "kernel"), f"{base}.{theirs}.weight", True
            if bias:
                yield (*layer, *ours, "bias"), f"{base}.{theirs}.bias", False


class TextPart(NamedTuple):
    """The text model inside a multimodal model."""

    model_type: str
    usual: dict[str, Any]  # values that its part of config.json omits, if not the family's


TEXT_PARTS = {
    "gemma3": TextPart("gemma3_text", {"num_attention_heads": presets.GEMMA3.num_heads}),
    "gemma4": TextPart("gemma4_text", {}),
    "gemma4_unified": TextPart(
        "gemma4_text",
        {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262_144},
    ),
}


SYNONYMS = {"gemma4_unified_assistant": "gemma4_assistant"}
"""Maps model_type names of transformers to others that are equivalent for text."""


def text_part(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json; for a multimodal model, the part of the text model."""
    text, kind = content.get("text_config"), content.get("model_type")
    if isinstance(kind, str) and kind in SYNONYMS:
        return {**content, "model_type": SYNONYMS[kind]}
    if not isinstance(text, dict) or not isinstance(kind, str) or kind not in TEXT_PARTS:
        return content
    part = TEXT_PARTS[kind]
    ends = {
        name: content[name]
        for name in ("eos_token_id", "bos_token_id", "pad_token_id")
        if content.get(name) is not None
    }
    return {**part.usual, **text, **ends, "model_type": part.model_type}


def canonical(name: str) -> str | None:
    """The name that parameter_names() gives an array of a folder; None for arrays that are not read: the
    vision parts of Gemma 3 and tables in old folders."""
    if name.endswith(".rotary_emb.inv_freq") or name.removeprefix("model.").startswith(
        ("vision_tower.", "multi_modal_projector.")
    ):
        return None
    name = name.removeprefix("language_model.")
    return (
        f"model.{name.removeprefix('model.language_model.')}"
        if name.startswith("model.language_model.")
        else name
    )


def describe(config: DecoderConfig) -> dict[str, Any]:
    """The content of config.json. Raises ValueError for a model that its family's code cannot represent."""
    spelling, layers = DECODER_SPELLINGS[config.family], range(config.num_layers)
    content = {theirs: getattr(config, ours) for ours, theirs in (SHARED | spelling.fields).items()}
    content |= {
        "model_type": config.family,
        "architectures": [spelling.architecture],
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
    }
    if config.more_eos:
        content["eos_token_id"] = [config.eos_id, *config.more_eos]
    if "query_scalar" in spelling.fields:
        content["query_pre_attn_scalar"] = config.query_scalar or config.d_kv
    if config.rope_type != "default":
        stretched = {theirs: getattr(config, ours) for ours, theirs in STRETCHED[config.rope_type].items()}
        if "original_max_position_embeddings" in stretched:
            stretched["original_max_position_embeddings"] = config.rope_length or config.max_positions
        content["rope_scaling"] = {"rope_type": config.rope_type, **stretched}
    if config.local_rope_theta is not None:
        content["rope_local_base_freq"] = config.local_rope_theta
    if spelling.windows:
        content["sliding_window"] = config.window
    if spelling.windows not in ("", "sliding_window"):
        content["layer_types"] = [LOCAL if config.is_local(n) else EVERYTHING for n in layers]
    if spelling.windows == "max_window_layers":
        content["use_sliding_window"] = config.window is not None
        content["max_window_layers"] = min(
            (n for n in layers if config.is_local(n)), default=config.num_layers
        )
    again, original = (
        vars(
            dataclasses.replace(
                shape,
                query_scalar=shape.query_scalar or shape.d_kv,
                rope_length=shape.rope_length or shape.max_positions,
            )
        )
        for shape in (read_config(Path("config.json"), content), config)
    )
    for name, value in original.items():
        if again[name] != value:
            raise ValueError(
                f"{name} is {shown(value)}, and Hugging Face's {config.family} is only ever "
                f"{shown(again[name])}: export it natively."
            )
    return content
