"""Hugging Face T5 folders: config.json, safetensors (one file or sharded), spiece.model.

Both directions. Only safetensors is read, never a pickle.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from speccascade_jax.models.t5 import T5Config, T5Model

CONFIG_KEYS = {
    "vocab_size": "vocab_size", "d_model": "d_model", "d_kv": "d_kv", "d_ff": "d_ff",
    "num_heads": "num_heads", "num_encoder_layers": "num_layers",
    "num_decoder_layers": "num_decoder_layers", "relative_buckets": "relative_attention_num_buckets",
    "relative_max_distance": "relative_attention_max_distance", "dropout_rate": "dropout_rate",
    "pad_id": "pad_token_id", "eos_id": "eos_token_id", "layer_norm_epsilon": "layer_norm_epsilon",
}


def parameter_names(config: T5Config) -> Iterator[tuple[tuple[Any, ...], str, bool]]:
    """(path in our parameters, Hugging Face's name, whether theirs is transposed) of every array."""
    yield ("embedding",), "shared.weight", False
    if not config.tied_embeddings:
        yield ("head", "kernel"), "lm_head.weight", True
    up = [("gate", "wi_0"), ("up", "wi_1")] if config.gated else [("gate", "wi")]
    for stack, layers in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        yield (f"{stack}_norm", "scale"), f"{stack}.final_layer_norm.weight", False
        yield ((f"{stack}_bias",),
               f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", False)
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


def read_config(folder: Path) -> T5Config:
    """The T5Config of a config.json. Raises ValueError for another architecture."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {folder / 'config.json'}: {error}") from None
    if found.get("model_type") != "t5":
        raise ValueError(f"{folder} holds a {found.get('model_type')!r} model; only t5 is supported.")
    activation = found.get("feed_forward_proj", "relu")
    if activation not in ("relu", "gated-gelu"):
        raise ValueError(f"{folder}: feed_forward_proj is {activation!r}; relu and gated-gelu are supported.")
    found.setdefault("num_decoder_layers", found.get("num_layers"))
    if found["num_decoder_layers"] is None:
        found["num_decoder_layers"] = found.get("num_layers")
    values = {ours: found[theirs] for ours, theirs in CONFIG_KEYS.items() if theirs in found}
    # transformers 5 writes tie_word_embeddings: true for every T5; what tells 1.0 from 1.1 is the scale.
    tied = found.get("scale_decoder_outputs", found.get("tie_word_embeddings", True))
    return T5Config(**values, gated=activation == "gated-gelu", tied_embeddings=tied)


def load(folder: Path, dtype: Any) -> tuple[T5Model, nnx.State]:
    """Model and parameters in `dtype`, converted one array at a time.

    Raises ValueError naming the array that is missing, truncated or of another shape.
    """
    model = T5Model(read_config(folder))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards: dict[str, str] = json.loads(index.read_text())["weight_map"]
    else:
        shards = {}
    params = model.abstract_params()
    flat = dict(nnx.to_flat_state(params))
    with contextlib.ExitStack() as stack:
        open_files: dict[str, Any] = {}

        def read(name: str) -> np.ndarray:
            file = shards.get(name, "model.safetensors")
            try:
                if file not in open_files:
                    open_files[file] = stack.enter_context(safe_open(folder / file, framework="flax"))
                if name == "lm_head.weight" and name not in open_files[file].keys():  # noqa: SIM118
                    name = "shared.weight"  # an unscaled head that was tied when it was saved
                return open_files[file].get_tensor(name)
            except FileNotFoundError:
                raise ValueError(f"{folder / file} is missing.") from None
            except SafetensorError as error:
                raise ValueError(f"{folder / file}: {name} cannot be read ({error}); the file is truncated "
                                 "or not a T5 checkpoint: fetch it again.") from None

        for path, name, transposed in parameter_names(model.config):
            array = read(name)
            array = array.T if transposed else array
            if array.shape != flat[path].shape:
                raise ValueError(f"{folder}: {name} has shape {array.shape}, config.json says "
                                 f"{flat[path].shape}.")
            flat[path] = flat[path].replace(jnp.asarray(array, dtype))
    nnx.update(params, nnx.from_flat_state(flat))
    return model, params


def save(folder: Path, model: T5Model, params: nnx.State, dtype: Any = ml_dtypes.bfloat16) -> None:
    """Writes config.json and model.safetensors in `dtype`; transformers reads the folder."""
    config = model.config
    folder.mkdir(parents=True, exist_ok=True)
    flat = dict(nnx.to_flat_state(params))
    tensors = {}
    for path, name, transposed in parameter_names(config):
        array = np.asarray(jax.device_get(flat[path][...])).astype(dtype)
        tensors[name] = np.ascontiguousarray(array.T if transposed else array)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = {theirs: getattr(config, ours) for ours, theirs in CONFIG_KEYS.items()}
    described |= {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"],
                  "feed_forward_proj": "gated-gelu" if config.gated else "relu",
                  "is_encoder_decoder": True, "decoder_start_token_id": config.pad_id,
                  "tie_word_embeddings": config.tied_embeddings,
                  "scale_decoder_outputs": config.tied_embeddings,
                  "torch_dtype": np.dtype(dtype).name}
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n")
