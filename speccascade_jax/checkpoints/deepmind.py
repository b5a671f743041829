"""Reads Gemma 2 and 3 in DeepMind's format (Flax, on Kaggle), an Orbax directory.

Its names are flat (`transformer/layer_0/attn/q_einsum`, `w`) or nested (google-deepmind/gemma, gm/ckpts);
heads have their own axis; keys and values, and the two halves of GeGLU, are stacked. Vision arrays are not
read.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from speccascade_jax.checkpoints.arrays import Placement, reason, to_params
from speccascade_jax.checkpoints.decoder import check
from speccascade_jax.checkpoints.files import check_folder
from speccascade_jax.models.decoder import DecoderConfig, DecoderModel
from speccascade_jax.models.presets import GEMMA2, GEMMA3, PRESETS

VOCABULARY, PADDED_VOCABULARY = 256_000, 256_128  # Gemma 2's embedding ends with unused rows
Entries = Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]]  # name -> (keys in the file, shape)


def read_entries(folder: Path) -> Entries:
    """Every array of the directory by its nested name, without reading it. Raises ValueError."""
    import orbax.checkpoint as ocp

    entries: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}

    def walk(tree: Any, keys: tuple[str, ...]) -> None:
        if isinstance(tree, Mapping):
            for key, part in tree.items():
                walk(part, (*keys, key))
        else:
            name = "/".join(keys).removeprefix("params/").removeprefix("transformer/").removesuffix("/w")
            entries[name] = keys, tuple(tree.shape)

    check_folder(folder)
    try:
        walk(ocp.StandardCheckpointer().metadata(folder.resolve()).item_metadata.tree, ())
    except Exception as error:  # Orbax raises many types
        raise ValueError(f"{folder}: the checkpoint is incomplete or damaged ({reason(error)}).") from None
    return entries


def shape_of(folder: Path, entries: Entries, name: str, rank: int) -> tuple[int, ...]:
    shape = entries[name][1] if name in entries else ()
    if len(shape) != rank:
        raise ValueError(
            f"{folder}: the array {name} is missing or of another rank; this is no Gemma of "
            "DeepMind's, or it is incomplete: fetch it again."
        )
    return shape


def infer_config(folder: Path, entries: Entries) -> DecoderConfig:
    """The DecoderConfig that matches arrays of these shapes. Fields that cannot be inferred are those of the
    preset with these sizes, or else of Gemma 2 2b or Gemma 3 4b with the head's width as query_scalar."""
    vocab_size, d_model = shape_of(folder, entries, "embedder/input_embedding", 2)
    shared = "layer_0/attn/qkv_einsum" in entries
    query = shape_of(
        folder, entries, "layer_0/attn/qkv_einsum" if shared else "layer_0/attn/q_einsum", 4 if shared else 3
    )
    heads, d_kv = query[-3], query[-1]
    kv_heads = heads if shared else shape_of(folder, entries, "layer_0/attn/kv_einsum", 4)[1]
    usual = GEMMA3 if "layer_0/attn/_key_norm/scale" in entries else GEMMA2
    config = dataclasses.replace(
        usual,
        vocab_size=VOCABULARY if vocab_size == PADDED_VOCABULARY else vocab_size,
        d_model=d_model,
        d_kv=d_kv,
        d_ff=shape_of(folder, entries, "layer_0/mlp/linear", 2)[0],
        num_heads=heads,
        num_kv_heads=kv_heads,
        query_scalar=d_kv,
        num_layers=sum(name.startswith("layer_") and name.endswith("/mlp/linear") for name in entries),
    )
    for preset in PRESETS.values():
        if all(
            getattr(preset, name) == getattr(config, name) for name in ("family", "d_model", "num_layers")
        ):
            config = dataclasses.replace(preset, vocab_size=config.vocab_size)
    check(folder, config)
    return config


def read_config(folder: Path) -> DecoderConfig:
    return infer_config(folder, read_entries(folder))


def converted(config: DecoderConfig, arrays: dict[str, np.ndarray]) -> dict[tuple[str, ...], np.ndarray]:
    """A layer's arrays (named without the layer) by our paths."""

    def columns(x: np.ndarray) -> np.ndarray:
        """[heads, D, K] -> [D, heads K]"""
        return np.moveaxis(x, 0, 1).reshape(config.d_model, -1)

    if "attn/qkv_einsum" in arrays:
        query, key, value = arrays["attn/qkv_einsum"]
    else:
        query, (key, value) = arrays["attn/q_einsum"], arrays["attn/kv_einsum"]
    gate, up = arrays["mlp/gating_einsum"]
    if gate.shape != (config.d_model, config.d_ff):  # transposed in 9b and 27b
        gate, up = gate.T, up.T
    out = arrays["attn/attn_vec_einsum"].reshape(-1, config.d_model)
    kernels = {
        ("attention", "query"): columns(query),
        ("attention", "key"): columns(key),
        ("attention", "value"): columns(value),
        ("attention", "out"): out,
        ("mlp", "gate"): gate,
        ("mlp", "up"): up,
        ("mlp", "down"): arrays["mlp/linear"],
    }
    scales = {
        "attention_norm": "pre_attention_norm",
        "attention_post_norm": "post_attention_norm",
        "mlp_norm": "pre_ffw_norm",
        "mlp_post_norm": "post_ffw_norm",
    }
    if config.head_norms:
        scales |= {"attention/query_norm": "attn/_query_norm", "attention/key_norm": "attn/_key_norm"}
    return {
        **{(*path, "kernel"): array for path, array in kernels.items()},
        **{(*ours.split("/"), "scale"): arrays[f"{theirs}/scale"] for ours, theirs in scales.items()},
    }


def load(folder: Path, place: Placement) -> tuple[DecoderModel, nnx.State]:
    """Loads the model and its parameters, with one layer at a time on the host.

    The model's shape is inferred from the arrays. Raises ValueError naming what is missing, damaged or does
    not fit.
    """
    import orbax.checkpoint as ocp

    entries = read_entries(folder)
    model = DecoderModel(infer_config(folder, entries))
    config = model.config
    shapes = {path: tuple(x.shape) for path, x in nnx.to_flat_state(model.abstract_params())}

    def fetch(prefix: str) -> dict[str, np.ndarray]:
        """The arrays whose names begin with `prefix`, by the rest of the name."""
        wanted: dict[str, Any] = {}
        chosen = {name: keys for name, (keys, _) in entries.items() if name.startswith(prefix)}
        for keys in chosen.values():
            inside = wanted
            for key in keys[:-1]:
                inside = inside.setdefault(key, {})
            inside[keys[-1]] = ocp.RestoreArgs(restore_type=np.ndarray)
        try:
            tree = ocp.PyTreeCheckpointer().restore(
                folder.resolve(),
                args=ocp.args.PyTreeRestore(item=wanted, restore_args=wanted, partial_restore=True),
            )
        except Exception as error:  # Orbax raises many types, including Exception
            raise ValueError(
                f"{folder}: {prefix}: the checkpoint is incomplete or damaged ({reason(error)})."
            ) from None
        restored = {}
        for name, keys in chosen.items():
            array = tree
            for key in keys:
                array = array[key]
            restored[name.removeprefix(prefix)] = array
        return restored

    def read() -> Iterator[tuple[tuple[Any, ...], str, np.ndarray]]:
        parts = [
            ("embedder/", ()),
            ("final_norm/", ()),
            *((f"layer_{n}/", ("layers", n)) for n in range(config.num_layers)),
        ]
        for prefix, path in parts:
            fetched = fetch(prefix)
            try:
                arrays: dict[tuple[str, ...], np.ndarray]
                if prefix == "embedder/":
                    arrays = {("embedding",): fetched["input_embedding"][: config.vocab_size]}
                elif prefix == "final_norm/":
                    arrays = {("norm", "scale"): fetched["scale"]}
                else:
                    arrays = converted(config, fetched)
            except KeyError as error:
                raise ValueError(
                    f"{folder}: the array {prefix}{error.args[0]} is missing; the checkpoint is "
                    "incomplete: fetch it again."
                ) from None
            except (ValueError, IndexError) as error:  # arrays with a wrong rank or size
                raise ValueError(
                    f"{folder}: the arrays of {prefix} are not a Gemma's ({reason(error)}): fetch it again."
                ) from None
            for inside, array in arrays.items():
                name, expected = f"{prefix}{'/'.join(inside)}", shapes[(*path, *inside)]
                if array.shape != expected:
                    raise ValueError(
                        f"{folder}: {name} has shape {array.shape}, the other arrays imply "
                        f"{expected}: fetch it again."
                    )
                yield (*path, *inside), f"{folder}: {name}", array

    return model, to_params(model, read(), place)
