"""Hugging Face folders: config.json and safetensors (one file or sharded).

Reads and writes them. Each family's names of fields and arrays are in its own file. If there is no
safetensors file, pytorch_model.bin is read as data, without unpickling.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from speccascade_jax.checkpoints import decoder, dflash, eagle
from speccascade_jax.checkpoints.arrays import (
    Index,
    ParameterPath,
    Placement,
    Stored,
    check,
    checksum,
    to_params,
)
from speccascade_jax.checkpoints.families import MODEL_FAMILIES, family_of
from speccascade_jax.checkpoints.files import check_regular, checked_path, exists, read_json, shown
from speccascade_jax.checkpoints.torch_files import TorchFile
from speccascade_jax.models import Config, Model, model_of

SHARD_BYTES = 5 * 10**9  # most bytes of arrays in one file; the host holds those of one file at a time
TORCH_FILE = "pytorch_model.bin"
Headers = dict[str, tuple[str, tuple[int, ...], str]]
"""Name of an array in parameter_names() -> (file, shape, name in the file)."""


def read_config(folder: Path) -> Config:
    """The model's shape in a config.json. Raises ValueError for another architecture."""
    where = folder / "config.json"
    content = read_json(where)
    if content.get("quantization_config") is not None:
        raise ValueError(
            f"{folder} holds quantised weights (quantization_config), which are not read: take "
            f"the "
            "model in bfloat16; --dtype=int8 quantises it here."
        )
    content = dflash.as_drafter(eagle.as_head(decoder.text_part(content)))
    family = family_of(folder, content.get("model_type"))
    config = family.read_config(where, content)
    if family.with_arrays is None:
        return config
    return family.with_arrays(config, read_headers(folder, family.canonical).keys())


def weight_files(folder: Path) -> list[str]:
    """The names of the folder's array files. Raises ValueError if the index names anything but regular files
    of this folder."""
    index = folder / "model.safetensors.index.json"
    files: set[Any] = {"model.safetensors"}
    if not exists(index) and not exists(folder / "model.safetensors") and exists(folder / TORCH_FILE):
        files = {TORCH_FILE}
    if exists(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} is damaged (it has no weight_map): fetch it again.")
        for file in weight_map.values():
            if not isinstance(file, str) or checked_path(file).name != file:
                raise ValueError(
                    f"{index} names {shown(file)}, which is not a file of this folder: fetch it again."
                )
        files = set(weight_map.values())
    for file in sorted(files):
        if not exists(folder / file) and exists(folder / "adapter_config.json"):
            raise ValueError(
                f"{folder} is an adapter without its model: merge it into the model it was "
                "trained on (peft's merge_and_unload), and save that."
            )
        if not exists(folder / file):
            raise ValueError(
                f"{folder / file} is missing: fetch it; of pickled weights only a single {TORCH_FILE} is "
                "read, save others again with safe_serialization=True."
            )
        check_regular(folder / file)
    return sorted(files)


def open_file(path: Path) -> Any:
    """Opens a file of arrays. Raises SafetensorError, OSError or ValueError if it is damaged."""
    return TorchFile(path) if path.name == TORCH_FILE else safe_open(path, framework="numpy")


def read_headers(folder: Path, canonical: Callable[[str], str | None]) -> Headers:
    """The model's arrays in the folder; only headers are read.

    Raises ValueError for a file that is missing, truncated or has another format.
    """
    headers: Headers = {}
    for file in weight_files(folder):
        try:
            with open_file(folder / file) as opened:
                for stored in opened.keys():  # noqa: SIM118
                    if (name := canonical(stored)) is not None:
                        headers[name] = file, tuple(opened.get_slice(stored).get_shape()), stored
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{folder / file} is truncated or not a safetensors file ({error}): fetch it again."
            ) from None
        except ValueError as error:
            raise ValueError(
                f"{folder / file} is damaged, or more than a dictionary of tensors ({error}): fetch it "
                "again, or save it with safe_serialization=True."
            ) from None
    return headers


def place_arrays(
    folder: Path, config: Config, headers: Headers
) -> list[tuple[ParameterPath, str, str, bool]]:
    """(path in our parameters, name, name of the array to read for it, whether that is transposed).

    Raises ValueError if the files' arrays are not those of `config`. The names are generated one at a
    time, so a config with more layers than the files have costs nothing.
    """
    family, places = MODEL_FAMILIES[config.family], []
    for path, name, transposed in family.parameter_names(config):
        stored = name if name in headers else family.stand_ins.get(name, name)
        if stored not in headers:
            raise ValueError(
                f"{folder}: the array {name} is missing; the checkpoint is incomplete or not config.json's."
            )
        places.append((path, name, stored, transposed))
    for name in sorted(headers.keys() - {stored for _, _, stored, _ in places} - family.unused(config)):
        raise ValueError(
            f"{folder}: {name} has no place in the model that config.json describes: "
            "fetch both again from one source."
        )
    return places


def load(folder: Path, place: Placement) -> tuple[Model, nnx.State]:
    """Model and parameters, converted one array at a time.

    Raises ValueError naming the array that is missing, damaged or of another shape than config.json's.
    """
    config = read_config(folder)
    headers = read_headers(folder, MODEL_FAMILIES[config.family].canonical)
    places, model = place_arrays(folder, config, headers), model_of(config)
    shapes = {path: tuple(x.shape) for path, x in nnx.to_flat_state(model.abstract_params())}
    for path, name, stored, transposed in places:
        expected = shapes[path][::-1] if transposed else shapes[path]
        if headers[stored][1] != expected:
            raise ValueError(
                f"{folder}: {name} has shape {headers[stored][1]}, config.json says {expected}: "
                "fetch both again from one source."
            )

    def read() -> Iterator[tuple[ParameterPath, str, np.ndarray | Stored]]:
        for path, name, stored, transposed in places:
            file, shape, stored = headers[stored]
            if file != TORCH_FILE and place.takes_part(path, shapes[path]):
                parts = stored_array(folder / file, stored, shape)
                yield path, f"{folder / file}: {name}", parts.T if transposed else parts
                continue
            # Reopened for each array, because the pages of a mapped file stay in memory until it is closed.
            with open_file(folder / file) as opened:
                try:
                    array = opened.get_tensor(stored)
                except Exception as error:  # a dtype that numpy lacks
                    raise ValueError(
                        f"{folder / file}: {name} cannot be read ({error}); only floating-point weights are."
                    ) from None
                expected = (opened.metadata() or {}).get(f"crc32 {stored}")
            if expected is not None:
                check(f"{folder / file}: {name}", array, int(expected) if expected.isdecimal() else -1)
            yield path, f"{folder / file}: {name}", array.T if transposed else array
            del array

    return model, to_params(model, read(), place)


def stored_array(path: Path, name: str, shape: tuple[int, ...]) -> Stored:
    """An array of a safetensors file that is read in parts."""

    def read(index: Index) -> np.ndarray:
        with safe_open(path, framework="numpy") as opened:
            return opened.get_slice(name)[index]

    with safe_open(path, framework="numpy") as opened:
        dtype = opened.get_slice(name)[(slice(0, 0),) * len(shape)].dtype
    return Stored(shape, dtype, read)


def save(folder: Path, model: Model, params: nnx.State, dtype: Any = ml_dtypes.bfloat16) -> None:
    """Writes config.json and safetensors (several files past SHARD_BYTES) in `dtype`; transformers reads
    the folder.

    Raises ValueError for a model that Hugging Face's architecture cannot represent.
    """
    family = MODEL_FAMILIES[model.config.family]
    described = family.describe(model.config)
    folder.mkdir(parents=True, exist_ok=True)
    flat = dict(nnx.to_flat_state(params))
    shards: list[list[tuple[Any, str, bool]]] = [[]]
    size = total = 0
    for entry in family.parameter_names(model.config):
        array_bytes = flat[entry[0]].size * np.dtype(dtype).itemsize
        if shards[-1] and size + array_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size, total = size + array_bytes, total + array_bytes
    files = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    )
    for file, entries in zip(files, shards, strict=True):
        tensors, metadata = {}, {"format": "pt"}
        for path, name, transposed in entries:
            array = np.asarray(flat[path][...])
            array = array if np.issubdtype(array.dtype, np.integer) else array.astype(dtype, copy=False)
            tensors[name] = np.ascontiguousarray(array.T if transposed else array)
            metadata[f"crc32 {name}"] = str(checksum(tensors[name]))
        save_file(tensors, folder / file, metadata=metadata)
    if len(shards) > 1:
        where = {name: file for file, entries in zip(files, shards, strict=True) for _, name, _ in entries}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    described["torch_dtype"] = np.dtype(dtype).name
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    for file in files:  # safetensors makes files readable only by the owner
        shutil.copymode(folder / "config.json", folder / file)
