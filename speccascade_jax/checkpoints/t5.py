"""T5 in Hugging Face folders: config.json and the names of the arrays."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints.fields import check_fields
from speccascade_jax.checkpoints.files import shown
from speccascade_jax.models.t5 import T5Config

CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "d_model": "d_model",
    "d_kv": "d_kv",
    "d_ff": "d_ff",
    "num_heads": "num_heads",
    "num_encoder_layers": "num_layers",
    "num_decoder_layers": "num_decoder_layers",
    "relative_buckets": "relative_attention_num_buckets",
    "relative_max_distance": "relative_attention_max_distance",
    "dropout_rate": "dropout_rate",
    "pad_id": "pad_token_id",
    "eos_id": "eos_token_id",
    "layer_norm_epsilon": "layer_norm_epsilon",
}
UNUSED = frozenset(
    {
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "lm_head.weight",  # copies
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    }
)  # never read
STAND_INS = {"lm_head.weight": "shared.weight"}  # an unscaled head that was tied when saved


def read_config(where: Path, content: dict[str, Any]) -> T5Config:
    """The T5Config of a config.json's content. Raises ValueError for anything but T5 1.0 and 1.1."""
    activation = content.get("feed_forward_proj", "relu")
    if activation not in ("relu", "gated-gelu"):
        raise ValueError(
            f"{where}: feed_forward_proj is {shown(activation)}; relu and gated-gelu are supported."
        )
    if content.get("num_decoder_layers") is None and "num_layers" in content:
        content = {**content, "num_decoder_layers": content["num_layers"]}
    values = {ours: content[theirs] for ours, theirs in CONFIG_KEYS.items() if theirs in content}
    values["gated"] = activation == "gated-gelu"
    # transformers 5 writes tie_word_embeddings: true for every T5; the scale distinguishes 1.0 from 1.1.
    values["tied_embeddings"] = content.get("scale_decoder_outputs", content.get("tie_word_embeddings", True))
    check_fields(where, T5Config, values, {**CONFIG_KEYS, "tied_embeddings": "tie_word_embeddings"})
    config = T5Config(**values)
    check(where, config)
    return config


def describe(config: T5Config) -> dict[str, Any]:
    """The content of config.json. Raises ValueError for a model that Hugging Face's T5 cannot represent."""
    if not config.shared_position_bias:
        raise ValueError(
            "every layer of this model has a relative-position table of its own, which Hugging "
            "Face's T5 cannot hold: export it to T5X or natively."
        )
    described = {theirs: getattr(config, ours) for ours, theirs in CONFIG_KEYS.items()}
    return described | {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "feed_forward_proj": "gated-gelu" if config.gated else "relu",
        "is_encoder_decoder": True,
        "decoder_start_token_id": config.pad_id,
        "tie_word_embeddings": config.tied_embeddings,
        "scale_decoder_outputs": config.tied_embeddings,
    }


def parameter_names(config: T5Config) -> Iterator[tuple[tuple[Any, ...], str, bool]]:
    """(path in our parameters, Hugging Face's name, whether theirs is transposed) of every array."""
    yield ("embedding",), "shared.weight", False
    if not config.tied_embeddings:
        yield ("head", "kernel"), "lm_head.weight", True
    up = [("gate", "wi_0"), ("up", "wi_1")] if config.gated else [("gate", "wi")]
    for stack, layers in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        if not layers:  # it uses another network's encoder
            continue
        yield (f"{stack}_norm", "scale"), f"{stack}.final_layer_norm.weight", False
        yield (
            (f"{stack}_bias",),
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            False,
        )
        parts = [("attention", "SelfAttention")] + [("cross", "EncDecAttention")] * (stack == "decoder")
        for n in range(layers):
            for k, (ours, theirs) in enumerate(parts):
                base = f"{stack}.block.{n}.layer.{k}"
                yield (stack, n, f"{ours}_norm", "scale"), f"{base}.layer_norm.weight", False
                for a, b in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
                    yield (stack, n, ours, a, "kernel"), f"{base}.{theirs}.{b}.weight", True
            base = f"{stack}.block.{n}.layer.{len(parts)}"
            yield (stack, n, "mlp_norm", "scale"), f"{base}.layer_norm.weight", False
            for a, b in (*up, ("down", "wo")):
                yield (stack, n, "mlp", a, "kernel"), f"{base}.DenseReluDense.{b}.weight", True


def check(where: Any, config: T5Config) -> None:
    """Raises ValueError naming a value that no T5 can have."""
    check_fields(where, T5Config, dataclasses.asdict(config))
    buckets, distance = config.relative_buckets, config.relative_max_distance
    if buckets < 4:  # half for each direction, half of those for single steps
        raise ValueError(f"{where}: {buckets} buckets of relative positions are too few: at least 4.")
    if distance <= buckets // 2:
        raise ValueError(
            f"{where}: the largest relative distance is {distance}, but {buckets} buckets reach "
            f"further than {buckets // 2}."
        )
