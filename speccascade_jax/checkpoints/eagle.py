"""EAGLE-3 heads in Hugging Face folders, and with their verifiers in our format.

Two forms of config.json are read. That of the authors, SpecForge and AngelSlim describes the head's layer
with the fields of a Llama or Qwen 3 and `draft_vocab_size`. That of vLLM's speculators describes the layer in
a separate object.
"""

import dataclasses
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints import decoder
from speccascade_jax.checkpoints.arrays import ParameterPath
from speccascade_jax.checkpoints.fields import check_fields
from speccascade_jax.checkpoints.files import shown
from speccascade_jax.models.decoder import DecoderConfig
from speccascade_jax.models.eagle import (
    EAGLE,
    EagleConfig,
    EagleModel,
    EaglePairConfig,
    EaglePairModel,
    usual_layers,
)

LAYER = "transformer_layer_config"  # in speculators' folders
KIND = "speculators_model_type"
LAYERS = "eagle_aux_hidden_state_layer_ids"
WITHIN = "eagle_config"  # in which SpecForge names layers by their outputs
CONFIG_NAMES = {
    "draft_vocab_size": "draft_vocab_size",
    "state_width": "target_hidden_size",
    "norm_before_residual": "norm_before_residual",
}
UNSUPPORTED = "norm_before_fc", "fc_norm", "norm_output"
EMBEDDING = "embed_tokens.weight"
NORMS = {
    "embedding_norm": "input_layernorm",
    "feature_norm": "hidden_norm",
    "mlp_norm": "post_attention_layernorm",
}


def as_head(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json, with our model_type if it is an EAGLE-3 head."""
    is_head = "draft_vocab_size" in content or content.get(KIND) is not None
    return {**content, "model_type": EAGLE.family, "layer": content} if is_head else content


def read_config(where: Path, content: dict[str, Any]) -> EagleConfig:
    """The EagleConfig of as_head()'s content. Raises ValueError for what is not supported."""
    kind, layer = content.get(KIND, "eagle3"), content.get("layer", content)
    if kind != "eagle3":
        raise ValueError(f"{where}: {KIND} is {shown(kind)}; of these only eagle3 is supported.")
    if KIND in content:
        layer = content.get(LAYER)
        if not isinstance(layer, dict):
            raise ValueError(f"{where}: {LAYER} is {shown(layer)}, not an object.")
    for name in UNSUPPORTED:
        if content.get(name) not in (False, None):
            raise ValueError(f"{where}: {name} is {shown(content[name])}; only false is supported.")
    base = layer.get("model_type")
    if base not in ("llama", "qwen3"):
        raise ValueError(f"{where}: the head's layer is a {shown(base)} one; known: llama, qwen3.")
    plain = decoder.read_config(where, {**layer, "tie_word_embeddings": False})
    values = {name: value for name, value in vars(plain).items() if name != "family"}
    values |= {
        ours: content[theirs] for ours, theirs in CONFIG_NAMES.items() if content.get(theirs) is not None
    }
    values = {"state_width": plain.d_model, "draft_vocab_size": plain.vocab_size, **values}
    values["layers"] = layers_of(where, content)
    check_fields(where, EagleConfig, values, decoder.SHARED | CONFIG_NAMES | {"layers": LAYERS})
    config = EagleConfig(**values)
    check(where, config)
    return config


def layers_of(where: Path, content: dict[str, Any]) -> tuple[int, ...]:
    """The verifier's layers whose input states the head reads; () for the default ones.

    Raises ValueError for invalid layers, and for a head that reads only the last state.
    """
    inner = content.get(WITHIN)
    inner = {} if inner is None else inner
    if not isinstance(inner, dict):
        raise ValueError(f"{where}: {WITHIN} is {shown(inner)}, not an object.")
    reads = inner.get("use_aux_hidden_state", True)
    if reads is not True:
        raise ValueError(f"{where}: use_aux_hidden_state is {shown(reads)}; only true is supported.")
    shift, named = (0, content.get(LAYERS)) if content.get(LAYERS) is not None else (1, inner.get(LAYERS))
    if named is None or named == []:
        return ()
    if not isinstance(named, list) or any(type(number) is not int for number in named):
        raise ValueError(f"{where}: {LAYERS} is {shown(named)}, not a list of layers.")
    return tuple(number + shift for number in named)


def with_arrays(config: EagleConfig, names: Set[str]) -> EagleConfig:
    """The config of a folder that contains arrays of these names."""
    return dataclasses.replace(config, own_embedding=EMBEDDING in names)


def check(where: Any, config: EagleConfig) -> None:
    """Raises ValueError naming a value that no head can have."""
    check_fields(where, EagleConfig, dataclasses.asdict(config))
    decoder.check(where, as_decoder(config))
    c, wrong = config, list[str]()
    if c.num_layers != 1:
        wrong.append(f"num_hidden_layers is {c.num_layers}; only heads of one layer are supported")
    if c.local or c.post_norms or c.unit_offset or c.tied_embeddings or c.scaled_embedding:
        wrong.append("a head's layer is that of a Llama or of a Qwen 3, without a window")
    if c.draft_vocab_size > c.vocab_size:
        wrong.append(f"draft_vocab_size is {c.draft_vocab_size}, more than the {c.vocab_size} of vocab_size")
    if len(set(c.layers)) < len(c.layers) or min(c.layers, default=0) < 0:
        wrong.append(f"{LAYERS} is {shown(list(c.layers))}, not different layers")
    for sentence in wrong:
        raise ValueError(f"{where}: {sentence}.")


def as_decoder(config: EagleConfig) -> DecoderConfig:
    """The config of a decoder with such a layer."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(DecoderConfig)}
    return DecoderConfig(**values | {"family": "qwen3" if config.head_norms else "llama"})


def describe(config: EagleConfig) -> dict[str, Any]:
    """The content of config.json. Raises ValueError for a head that other readers could not read."""
    content = decoder.describe(as_decoder(config)) | {
        theirs: getattr(config, ours) for ours, theirs in CONFIG_NAMES.items()
    }
    content["architectures"] = ["LlamaForCausalLMEagle3"]
    if config.layers:
        content[LAYERS] = list(config.layers)
        content[WITHIN] = {LAYERS: [n - 1 for n in config.layers], "use_aux_hidden_state": True}
    return content


def parameter_names(config: EagleConfig) -> Iterator[tuple[ParameterPath, str, bool]]:
    """(path in our parameters, their name, whether theirs is transposed) of every array."""
    if config.own_embedding:
        yield ("embedding",), EMBEDDING, False
    yield ("projection", "kernel"), "fc.weight", True
    for path, name, transposed in decoder.parameter_names(as_decoder(config), NORMS):
        if path[0] == "layers":
            yield ("layer", *path[2:]), name.replace("model.layers.0.", "midlayer."), transposed
    yield ("norm", "scale"), "norm.weight", False
    yield ("head", "kernel"), "lm_head.weight", True
    if config.draft_vocab_size < config.vocab_size:
        yield ("offsets",), "d2t", False


def canonical(name: str) -> str | None:
    """The name that parameter_names() gives an array of a folder; None for arrays that are not read: the
    verifier's, and the table from its tokens to the head's."""
    name = name.removeprefix("model.")
    if name == "t2d" or name.startswith("verifier_"):
        return None
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def joined(where: Any, drafter: EagleModel, verifier: Any) -> EaglePairModel:
    """The network of a verifier and the head from the folder `where`. Raises ValueError for a head of another
    verifier."""
    head, full = drafter.config, verifier.config
    head = dataclasses.replace(head, layers=head.layers or usual_layers(full.num_layers))
    check_pair(where, head, full)
    return EaglePairModel(
        EaglePairConfig(full, head),
        verifier.dtype,
        verifier.cache_dtype,
        verifier.remat,
        verifier.stacked,
        verifier.chunk,
    )


def check_config(where: Any, config: EaglePairConfig) -> None:
    """Raises ValueError naming a value that no verifier and its head can have."""
    check_fields(where, EaglePairConfig, vars(config))
    decoder.check(f"{where}: verifier", config.verifier)
    check(f"{where}: drafter", config.drafter)
    check_pair(where, config.drafter, config.verifier)


def check_pair(where: Any, drafter: EagleConfig, verifier: DecoderConfig) -> None:
    """Raises ValueError naming a field in which a head does not match a verifier."""
    another = f"{where} is the head of another verifier:"
    for name, ours, theirs in (
        ("vocab_size", drafter.vocab_size, verifier.vocab_size),
        ("target_hidden_size", drafter.state_width, verifier.d_model),
    ):
        if ours != theirs:
            raise ValueError(f"{another} its {name} is {ours}, the verifier has {theirs}.")
    wrong = [n for n in drafter.layers if not 0 <= n <= verifier.num_layers]
    if wrong or len(set(drafter.layers)) < max(len(drafter.layers), 1):
        raise ValueError(
            f"{another} it reads the states before layers {shown(list(drafter.layers))}, the verifier has "
            f"{verifier.num_layers} layers."
        )
    if not drafter.own_embedding and drafter.d_model != verifier.d_model:
        raise ValueError(
            f"{where} holds no {EMBEDDING}, and the verifier's has a width of {verifier.d_model}, not "
            f"{drafter.d_model}: fetch the head again."
        )


def pair_names(config: EaglePairConfig) -> Iterator[tuple[ParameterPath, str, bool]]:
    """(path in our parameters, a name, False) of every array."""
    for name, part in (("verifier", decoder.parameter_names), ("drafter", parameter_names)):
        for path, _, _ in part(getattr(config, name)):
            yield (name, *path), ".".join(map(str, (name, *path))), False
