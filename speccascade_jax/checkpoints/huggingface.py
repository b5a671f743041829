"""Hugging Face folders of T5 and Gemma 2: config.json and safetensors (one file or sharded).

Both directions. Only safetensors is read, never a pickle.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from speccascade_jax.checkpoints import gemma
from speccascade_jax.checkpoints.arrays import Placement, check, checksum, to_params
from speccascade_jax.models import Config, Model, model_of
from speccascade_jax.models.gemma import GemmaConfig
from speccascade_jax.models.t5 import T5Config

SHARD_BYTES = 5 * 10**9  # of arrays in one file, at most: on the host, one file's are alive at a time
CONFIG_KEYS = {
    "vocab_size": "vocab_size", "d_model": "d_model", "d_kv": "d_kv", "d_ff": "d_ff",
    "num_heads": "num_heads", "num_encoder_layers": "num_layers",
    "num_decoder_layers": "num_decoder_layers", "relative_buckets": "relative_attention_num_buckets",
    "relative_max_distance": "relative_attention_max_distance", "dropout_rate": "dropout_rate",
    "pad_id": "pad_token_id", "eos_id": "eos_token_id", "layer_norm_epsilon": "layer_norm_epsilon",
}


def parameter_names(config: Config) -> Iterator[tuple[tuple[Any, ...], str, bool]]:
    """(path in our parameters, Hugging Face's name, whether theirs is transposed) of every array."""
    if isinstance(config, GemmaConfig):
        yield from gemma.parameter_names(config)
        return
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


UNUSED = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight",  # copies
          "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"}  # never read by T5


def read_config(folder: Path) -> Config:
    """The model's shape in a config.json. Raises ValueError for another architecture."""
    try:
        found = json.loads((folder / "config.json").read_text())
        kind = found.get("model_type")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"cannot read {folder / 'config.json'}: {error}") from None
    if kind == GemmaConfig.family:
        return gemma.read_config(folder, found)
    if kind != T5Config.family:
        raise ValueError(f"{folder} holds a {kind!r} model; only t5 and gemma2 are supported.")
    activation = found.get("feed_forward_proj", "relu")
    if activation not in ("relu", "gated-gelu"):
        raise ValueError(f"{folder}: feed_forward_proj is {activation!r}; relu and gated-gelu are supported.")
    found.setdefault("num_decoder_layers", found.get("num_layers"))
    if found["num_decoder_layers"] is None:
        found["num_decoder_layers"] = found.get("num_layers")
    values = {ours: found[theirs] for ours, theirs in CONFIG_KEYS.items() if theirs in found}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{folder / 'config.json'}: {CONFIG_KEYS[name]} is {value!r}, not a number: "
                             "fetch it again.")
    # transformers 5 writes tie_word_embeddings: true for every T5; what tells 1.0 from 1.1 is the scale.
    tied = found.get("scale_decoder_outputs", found.get("tie_word_embeddings", True))
    return T5Config(**values, gated=activation == "gated-gelu", tied_embeddings=tied)


def read_headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (file, shape) of every array; the headers alone are read.

    Raises ValueError for a file that is missing, truncated or no safetensors.
    """
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        try:
            files = set(json.loads(index.read_text())["weight_map"].values())
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index} is damaged: fetch it again.") from None
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(files):
        try:
            with safe_open(folder / file, framework="numpy") as opened:
                found |= {name: (file, tuple(opened.get_slice(name).get_shape()))
                          for name in opened.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise ValueError(f"{folder / file} is missing: fetch it; pickled weights (.bin) are never read, "
                             "save them again with safe_serialization=True.") from None
        except SafetensorError as error:
            raise ValueError(f"{folder / file} is truncated or no safetensors file ({error}): fetch it again."
                             ) from None
    return found


def load(folder: Path, place: Placement) -> tuple[Model, nnx.State]:
    """Model and parameters, converted one array at a time.

    Raises ValueError naming the array that is missing, damaged or of another shape than config.json's.
    """
    model = model_of(read_config(folder))
    found, names = read_headers(folder), list(parameter_names(model.config))
    if "lm_head.weight" not in found and "shared.weight" in found:
        found["lm_head.weight"] = found["shared.weight"]  # an unscaled head that was tied when saved
    for name in found.keys() - {name for _, name, _ in names} - UNUSED:
        raise ValueError(f"{folder}: {name} has no place in the model that config.json describes: "
                         "fetch both again from one place.")
    shapes = {path: tuple(x.shape) for path, x in nnx.to_flat_state(model.abstract_params())}
    for path, name, transposed in names:
        if name not in found:
            raise ValueError(f"{folder}: the array {name} is missing; the checkpoint is incomplete or not "
                             "config.json's.")
        expected = shapes[path][::-1] if transposed else shapes[path]
        if found[name][1] != expected:
            raise ValueError(f"{folder}: {name} has shape {found[name][1]}, config.json says {expected}: "
                             "fetch both again from one place.")

    def read() -> Iterator[tuple[tuple[Any, ...], str, np.ndarray]]:
        for path, name, transposed in names:
            file, _ = found[name]
            # Opened anew for each array: what was read of a mapped file stays in memory until it is closed.
            with safe_open(folder / file, framework="numpy") as opened:
                stored = name if name in opened.keys() else "shared.weight"  # noqa: SIM118
                array = opened.get_tensor(stored)
                expected = (opened.metadata() or {}).get(f"crc32 {stored}")
            check(f"{folder / file}: {name}", array, expected and int(expected))
            yield path, f"{folder / file}: {name}", array.T if transposed else array
            del array

    return model, to_params(model, read(), place)


def save(folder: Path, model: Model, params: nnx.State, dtype: Any = ml_dtypes.bfloat16) -> None:
    """Writes config.json and safetensors (several files past SHARD_BYTES) in `dtype`; transformers reads
    the folder.

    Raises ValueError for a model that Hugging Face's T5 cannot hold.
    """
    config = model.config
    if isinstance(config, T5Config) and not config.shared_position_bias:
        raise ValueError("every layer of this model has a relative-position table of its own, which Hugging "
                         "Face's T5 cannot hold: export it to T5X or natively.")
    folder.mkdir(parents=True, exist_ok=True)
    flat = dict(nnx.to_flat_state(params))
    shards: list[list[tuple[Any, str, bool]]] = [[]]
    size = total = 0
    for entry in parameter_names(config):
        array_bytes = flat[entry[0]].size * np.dtype(dtype).itemsize
        if shards[-1] and size + array_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size, total = size + array_bytes, total + array_bytes
    files = ["model.safetensors"] if len(shards) == 1 else [
        f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    for file, entries in zip(files, shards, strict=True):
        tensors, metadata = {}, {"format": "pt"}
        for path, name, transposed in entries:
            array = np.asarray(flat[path][...]).astype(dtype, copy=False)
            tensors[name] = np.ascontiguousarray(array.T if transposed else array)
            metadata[f"crc32 {name}"] = str(checksum(tensors[name]))
        save_file(tensors, folder / file, metadata=metadata)
    if len(shards) > 1:
        where = {name: file for file, entries in zip(files, shards, strict=True) for _, name, _ in entries}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    described = gemma.describe(config) if isinstance(config, GemmaConfig) else describe(config)
    described["torch_dtype"] = np.dtype(dtype).name
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    for file in files:  # safetensors lets nobody but the owner read
        shutil.copymode(folder / "config.json", folder / file)


def describe(config: T5Config) -> dict[str, Any]:
    """The content of config.json."""
    described = {theirs: getattr(config, ours) for ours, theirs in CONFIG_KEYS.items()}
    return described | {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"],
                        "feed_forward_proj": "gated-gelu" if config.gated else "relu",
                        "is_encoder_decoder": True, "decoder_start_token_id": config.pad_id,
                        "tie_word_embeddings": config.tied_embeddings,
                        "scale_decoder_outputs": config.tied_embeddings}
