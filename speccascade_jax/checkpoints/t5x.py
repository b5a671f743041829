"""T5X checkpoints, local or at gs://: a msgpack file `checkpoint` that names zarr arrays next to it.

Reads and writes both of T5X's layouts: examples/t5 (one array per layer, one relative-position table per
stack) and examples/scalable_t5 (layers stacked on axis 1, a separate axis for heads, one table per layer).
Only weights are read and written, no optimizer state. Settings that cannot be inferred from the arrays, which
T5X keeps in gin files, are written to a file of our own next to `checkpoint`; a folder without it is read as
T5 1.1.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx, serialization, traverse_util

from speccascade_jax.checkpoints.arrays import (
    Index,
    Placement,
    Stored,
    chunks,
    ends_of,
    open_arrays,
    open_directory,
    read_array,
    reason,
    to_params,
)
from speccascade_jax.checkpoints.fields import check_fields
from speccascade_jax.checkpoints.files import MEGABYTE, check_folder, check_regular, exists, parse_json, shown
from speccascade_jax.checkpoints.t5 import check
from speccascade_jax.models import Model
from speccascade_jax.models.t5 import T5Config, T5Model

Shape = tuple[int, ...]
UNTOLD = "relative_max_distance", "layer_norm_epsilon", "dropout_rate", "pad_id", "eos_id"
"""The fields of a T5Config that cannot be inferred from the arrays' shapes."""
UNTOLD_FILE = "t5_config.json"
LARGEST_FILE = 512 * MEGABYTE  # of `checkpoint`, which names arrays; old versions store small ones in it


def array_names(config: T5Config) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """(T5X's name, paths in our parameters) of every array: one path, or those of the stacked layers."""
    yield "token_embedder/embedding", [("embedding",)]
    if not config.tied_embeddings:
        yield "decoder/logits_dense/kernel", [("head", "kernel")]
    up = [("gate", "wi_0"), ("up", "wi_1")] if config.gated else [("gate", "wi")]
    for stack, layers in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        decoder = stack == "decoder"
        inside = stack if config.shared_position_bias else f"{stack}/{stack}"
        yield f"{stack}/{stack}_norm/scale", [(f"{stack}_norm", "scale")]
        yield f"{inside}/relpos_bias/rel_embedding", [(f"{stack}_bias",)]
        attention = "self_attention" if decoder else "attention"
        parts = [
            (("mlp_norm", "scale"), "pre_mlp_layer_norm/scale"),
            *((("mlp", a, "kernel"), f"mlp/{b}/kernel") for a, b in (*up, ("down", "wo"))),
        ]
        for ours, theirs, norm in (
            ("attention", attention, f"pre_{attention}_layer_norm"),
            *[("cross", "encoder_decoder_attention", "pre_cross_attention_layer_norm")] * decoder,
        ):
            parts += [
                ((f"{ours}_norm", "scale"), f"{norm}/scale"),
                *(((ours, a, "kernel"), f"{theirs}/{a}/kernel") for a in ("query", "key", "value", "out")),
            ]
        for path, name in parts:
            paths: list[tuple[Any, ...]] = [(stack, n, *path) for n in range(layers)]
            if config.shared_position_bias:
                yield from ((f"{stack}/layers_{n}/{name}", [paths[n]]) for n in range(layers))
            else:
                yield f"{inside}/{name}", paths


def is_stacked(name: str) -> bool:
    """Whether the array has a stack's layers on axis 1, which are separate arrays here."""
    stack, inside = name.split("/")[:2]
    return stack == inside and "relpos_bias" not in name


def stored_shape(config: T5Config, name: str, ours: Shape) -> Shape:
    """The shape in T5X of the array `name`; here it, or each of its layers, has the shape `ours`."""
    if "relpos_bias" in name:
        return ours[-1], *ours[:-1]  # [..., buckets, H] -> [H, ..., buckets]
    if not is_stacked(name):
        return ours
    heads = config.num_heads, config.d_kv
    if name.endswith(("query/kernel", "key/kernel", "value/kernel")):
        ours = ours[0], *heads
    elif name.endswith("out/kernel"):
        ours = *heads, ours[1]
    layers = config.num_encoder_layers if name.startswith("encoder") else config.num_decoder_layers
    return ours[0], layers, *ours[1:]


def read_entry(path: str, directory: Any, name: str) -> bytes | None:
    """A file of an open directory; None if it is missing. Raises ValueError if it cannot be reached."""
    if not path.startswith("gs://") and exists(Path(path, name)):
        check_regular(Path(path, name), LARGEST_FILE)
    try:
        entry = directory.read(name).result()
    except ValueError as error:
        raise ValueError(f"cannot read {path}/{name}: {reason(error)}") from None
    return entry.value if entry.state == "value" else None


def read_checkpoint_file(path: str) -> tuple[Any, bytes | None]:
    """open_directory(path) and its file `checkpoint`, if any. Raises ValueError if it cannot be reached."""
    try:
        directory = open_directory(path)
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {reason(error)}") from None
    return directory, read_entry(path, directory, "checkpoint")


def read_file(path: str) -> bytes:
    """A file at gs://. Raises ValueError if it is missing or cannot be reached."""
    folder, _, name = path.rpartition("/")
    try:
        entry = open_directory(folder).read(name).result()
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {reason(error)}") from None
    if entry.state != "value":
        raise ValueError(f"there is no file {path}.")
    return entry.value


def exists_at(path: str) -> bool:
    return read_checkpoint_file(path)[1] is not None


def parse(path: str, content: bytes) -> dict[str, Any]:
    """Name -> inline array, or folder of the zarr array, of every parameter that a file `checkpoint`
    names."""
    try:
        contents = serialization.msgpack_restore(content)
        target = contents.get("optimizer", contents)["target"]
        leaves = traverse_util.flatten_dict(target, sep="/", is_leaf=lambda _, x: "driver" in x)
        # Only the last part of a path counts: files may have been written elsewhere (drivers gfile and
        # gcs, absolute paths), and before TensorStore 0.1.14 the path lay outside of `kvstore`.
        arrays = {
            name: leaf
            if isinstance(leaf, np.ndarray)
            else Path(leaf["kvstore"].get("path") or leaf["path"]).name
            for name, leaf in leaves.items()
        }
        if {"", ".."} & {folder for folder in arrays.values() if isinstance(folder, str)}:
            raise ValueError("no folder")
        return arrays
    except Exception as error:  # msgpack and flax raise many types for damaged bytes
        raise ValueError(
            f"{path}/checkpoint is truncated or not T5X's ({type(error).__name__}): fetch it again."
        ) from None


def open_checkpoint(path: str) -> tuple[Any, dict[str, Any]]:
    """The directory, and name -> numpy array or open TensorStore, not yet read, of every parameter.

    Raises ValueError if `checkpoint` or an array's header is missing or damaged.
    """
    directory, content = read_checkpoint_file(path)
    if content is None:
        raise ValueError(f"{path} is not a T5X checkpoint: there is no file `checkpoint` in it.")
    leaves = parse(path, content)
    stored = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, np.ndarray)}
    if not path.startswith("gs://"):
        for folder in stored.values():
            check_folder(Path(path, folder))
    arrays = open_arrays(path, directory, stored)
    if not path.startswith("gs://"):
        for name, folder in stored.items():  # compressed arrays are hardly ever longer
            whole = math.prod(arrays[name].shape) * arrays[name].dtype.numpy_dtype.itemsize
            for file in Path(path, folder).iterdir():
                check_regular(file, whole + MEGABYTE)
    return directory, leaves | arrays


def infer_config(path: str, shapes: Mapping[str, Shape]) -> T5Config:
    """The T5Config that matches arrays of these shapes. Fields that cannot be inferred are those of T5 1.1.

    Raises ValueError naming an array that is missing.
    """

    def size(name: str, axis: int) -> int:
        if name not in shapes or not -len(shapes[name]) <= axis < len(shapes[name]):
            raise ValueError(
                f"{path}: the array {name} is missing or of another rank; this is no T5 encoder-"
                "decoder, or the checkpoint is incomplete."
            )
        return shapes[name][axis]

    shared = "encoder/encoder/relpos_bias/rel_embedding" not in shapes
    layers = {
        stack: len({name.split("/")[1] for name in shapes if name.startswith(f"{stack}/layers_")})
        if shared
        else size(f"{stack}/{stack}/pre_mlp_layer_norm/scale", 1)
        for stack in ("encoder", "decoder")
    }
    inside, first = ("encoder", "encoder/layers_0") if shared else ("encoder/encoder",) * 2
    heads = size(f"{inside}/relpos_bias/rel_embedding", 0)
    width = size(f"{first}/attention/query/kernel", -1)
    return T5Config(
        vocab_size=size("token_embedder/embedding", 0),
        d_model=size("token_embedder/embedding", 1),
        num_heads=heads,
        d_kv=width // max(heads, 1) if shared else width,
        d_ff=size(f"{first}/mlp/wo/kernel", 0),
        num_encoder_layers=layers["encoder"],
        num_decoder_layers=layers["decoder"],
        relative_buckets=size(f"{inside}/relpos_bias/rel_embedding", -1),
        gated=f"{first}/mlp/wi_0/kernel" in shapes,
        tied_embeddings="decoder/logits_dense/kernel" not in shapes,
        shared_position_bias=shared,
    )


def with_untold(path: str, directory: Any, config: T5Config) -> T5Config:
    """The config, completed from the file that our exports have next to the arrays. Raises ValueError if that
    is damaged."""
    content, where = read_entry(path, directory, UNTOLD_FILE), f"{path}/{UNTOLD_FILE}"
    if content is not None:
        fields = parse_json(where, content)
        for name in sorted(fields.keys() ^ set(UNTOLD)):
            raise ValueError(f"{where} is damaged: {shown(name)} is missing or no field of it.")
        check_fields(where, T5Config, {**dataclasses.asdict(config), **fields})
        config = dataclasses.replace(config, **fields)
    check(where if content is not None else path, config)
    return config


def config_and_arrays(path: str) -> tuple[T5Config, dict[str, Any]]:
    """The model's config and the open arrays, not yet read. Raises ValueError."""
    directory, arrays = open_checkpoint(path)
    config = infer_config(path, {name: tuple(array.shape) for name, array in arrays.items()})
    return with_untold(path, directory, config), arrays


def read_config(path: str | Path) -> T5Config:
    """The model's shape, from the arrays' headers. Raises ValueError."""
    return config_and_arrays(str(path))[0]


def load(path: str | Path, place: Placement) -> tuple[T5Model, nnx.State]:
    """Model and parameters, converted one array at a time.

    The model's shape is inferred from the arrays. Raises ValueError naming the array that is missing, damaged
    or does not fit the others.
    """
    path = str(path)
    config, arrays = config_and_arrays(path)
    model = T5Model(config)
    names = dict(array_names(config))
    for name in arrays.keys() - names.keys():
        raise ValueError(
            f"{path}: the array {name} is not part of a T5, or the arrays it belongs to are missing."
        )
    shapes = {path: tuple(x.shape) for path, x in nnx.to_flat_state(model.abstract_params())}
    for name, paths in names.items():
        if name not in arrays:
            raise ValueError(f"{path}: the array {name} is missing; the checkpoint is incomplete.")
        expected = stored_shape(config, name, shapes[paths[0]])
        if arrays[name].shape != expected:
            raise ValueError(
                f"{path}: {name} has shape {tuple(arrays[name].shape)}, but the other arrays "
                f"imply {expected}: the checkpoint is damaged, fetch it again."
            )

    def read() -> Iterator[tuple[tuple[Any, ...], str, np.ndarray | Stored]]:
        for name, paths in names.items():
            array = arrays[name]
            if not isinstance(array, np.ndarray) and place.takes_part(paths[0], shapes[paths[0]]):
                layers = stored_matrices(path, name, array, shapes[paths[0]], len(paths), config.d_kv)
                yield from (
                    (ours, f"{path}: {name}", layer) for ours, layer in zip(paths, layers, strict=True)
                )
                continue
            if not isinstance(array, np.ndarray):
                array = read_array(path, name, array)
            array = as_saved(array)
            if "relpos_bias" in name:
                array = np.moveaxis(array, 0, -1)
            for n, ours in enumerate(paths):
                part = array[:, n] if is_stacked(name) else array
                yield ours, f"{path}: {name}", part.reshape(shapes[ours])
            del array, part

    return model, to_params(model, read(), place)


def stored_matrices(path: str, name: str, array: Any, shape: Shape, layers: int, width: int) -> list[Stored]:
    """An open array as one matrix per layer, read in parts, which are read for all layers at once. Heads, of
    `width`, may have their own axis."""
    stacked, latest = is_stacked(name), dict[Any, np.ndarray]()
    heads = 0 if name.endswith("out/kernel") else 1  # the axis that contains the heads

    def read(ends: Any) -> np.ndarray:
        sizes, box = [end - begin for begin, end in ends], [slice(*pair) for pair in ends]
        if array.ndim - stacked > len(shape):  # no device's part begins inside a head
            begin, end = ends[heads]
            box[heads : heads + 1] = [slice(begin // width, end // width), slice(width)]
        box[1:1] = [slice(layers)] * stacked
        values = as_saved(read_array(path, name, array[tuple(box)].translate_to[0]))
        return np.moveaxis(values, 1, 0).reshape(layers, *sizes) if stacked else values.reshape(1, *sizes)

    def of_layer(number: int, index: Index) -> np.ndarray:
        ends = ends_of(index, shape)
        if ends not in latest:
            latest.clear()
            latest[ends] = read(ends)
        return latest[ends][number]

    return [Stored(shape, array.dtype.numpy_dtype, partial(of_layer, n)) for n in range(layers)]


def as_saved(array: np.ndarray) -> np.ndarray:
    """An array's values. T5X stored bfloat16 as integers up to version 2."""
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array


def save(folder: Path, model: Model, params: nnx.State, dtype: Any = np.float32) -> None:
    """Writes the parameters in `dtype` in T5X's format, as step 0 and without optimizer state.

    T5X's infer.py and eval.py restore it directly (InferenceState: target and step), and train.py does with
    utils.RestoreCheckpointConfig.fallback_to_scratch = True, which initialises the optimizer. Settings that
    T5X keeps in gin files are written to a separate file, which load() reads.
    """
    import tensorstore

    config: Any = model.config
    flat = dict(nnx.to_flat_state(params))
    target = {}
    for name, paths in array_names(config):
        arrays = [np.asarray(flat[path][...]).astype(dtype, copy=False) for path in paths]
        shape = stored_shape(config, name, arrays[0].shape)
        if is_stacked(name):
            array = np.stack([x.reshape(shape[0], *shape[2:]) for x in arrays], axis=1)
        else:
            array = np.moveaxis(arrays[0], -1, 0) if "relpos_bias" in name else arrays[0]
        spec = {
            "driver": "zarr",
            "dtype": np.dtype(dtype).name,
            "kvstore": {"driver": "file", "path": f"target.{name.replace('/', '.')}/"},
            "metadata": {
                "shape": list(shape),
                "chunks": chunks(array.shape, array.dtype.itemsize),
                "compressor": {"id": "gzip", "level": 1},
            },
        }
        place = {"driver": "file", "path": f"{folder.resolve()}/{spec['kvstore']['path']}"}
        # All-zero chunks are written too, because our reader treats a missing one as damage.
        tensorstore.open(
            {**spec, "kvstore": place, "store_data_equal_to_fill_value": True}, create=True
        ).result().write(array).result()
        target[name] = spec
    contents = {
        "version": 3,
        "optimizer": {
            "target": traverse_util.unflatten_dict(target, sep="/"),
            "state": {"step": np.zeros((), np.int32), "param_states": {}},
        },
    }
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(contents))
    untold = {name: getattr(config, name) for name in UNTOLD}
    (folder / UNTOLD_FILE).write_text(json.dumps(untold, indent=1) + "\n")
