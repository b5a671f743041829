"""Code shared by all formats: reads zarr arrays one at a time, converts them to parameters, and shortens
errors to one line."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from speccascade_jax.models import Model
from speccascade_jax.models.quantization import PackedKernel, pack, turned

ParameterPath = tuple[Any, ...]
Sharding = Callable[[ParameterPath, tuple[int, ...]], jax.sharding.Sharding]
"""(path of a parameter, its shape) -> its sharding."""


def reason(error: Exception) -> str:
    """The first line of an error, without the spec that TensorStore appends."""
    return str(error).split(" [tensorstore_spec")[0].split("\n")[0]


def open_directory(path: str) -> Any:
    """The directory at `path` (a folder or gs://) as a TensorStore KvStore. Raises ValueError."""
    import tensorstore

    where: dict[str, Any] = {"driver": "file", "path": f"{Path(path).resolve()}/"}
    if path.startswith("gs://"):
        bucket, _, inside = path.removeprefix("gs://").rstrip("/").partition("/")
        where = {
            "driver": "gcs",
            "bucket": bucket,
            "path": f"{inside}/".lstrip("/"),
            "gcs_request_retries": {"max_retries": 4},
        }  # 15 seconds instead of 15 minutes
    return tensorstore.KvStore.open(where).result()


def open_arrays(path: str, directory: Any, folders: Mapping[str, str]) -> dict[str, Any]:
    """Name -> open TensorStore of the zarr array in folders[name] of a KvStore.

    Reads only the headers. Raises ValueError naming an array that is missing or damaged.
    """
    import tensorstore

    # Every thread that reads or decompresses keeps its own memory.
    context = tensorstore.Context(
        {"file_io_concurrency": {"limit": 1}, "data_copy_concurrency": {"limit": 1}}
    )
    opening = {}
    for name, folder in folders.items():
        spec = {
            "driver": "zarr",
            "kvstore": (directory / f"{folder}/").spec().to_json(),
            "fill_missing_data_reads": False,
        }  # otherwise missing chunks read as zeros
        opening[name] = tensorstore.open(spec, open=True, read=True, context=context)
    opened = {}
    for name, array in opening.items():  # all are opened in parallel, because gs:// is slow
        try:
            opened[name] = array.result()
        except ValueError as error:
            raise ValueError(
                f"{path}: the array {name} is missing or damaged ({reason(error)}); fetch it again."
            ) from None
    return opened


def stored_array(path: str, name: str, array: Any) -> "Stored":
    """An open TensorStore as an array that is read in parts."""
    return Stored(
        array.shape,
        array.dtype.numpy_dtype,
        lambda index: read_array(path, name, array[index].translate_to[0]),
    )


def chunks(shape: tuple[int, ...], itemsize: int) -> list[int]:
    """The shape of an array's stored chunks, made by halving to at most CHUNK bytes if possible. Reading a
    part of the array then reads little more than that part."""
    sizes = list(shape)
    while math.prod(sizes) * itemsize > CHUNK and any(size % 2 == 0 for size in sizes):
        longest = max((size, axis) for axis, size in enumerate(sizes) if size % 2 == 0)[1]
        sizes[longest] //= 2
    return sizes


def read_array(path: str, name: str, array: Any) -> np.ndarray:
    """An open TensorStore's values. Raises ValueError if they are damaged."""
    import tensorstore

    try:
        values = np.empty(array.shape, array.dtype.numpy_dtype)  # allocated by this thread
        tensorstore.array(values).write(array).result()
        return values
    except MemoryError:
        raise ValueError(
            f"{path}: the array {name} of shape {array.shape} does not fit into memory."
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: the array {name} is damaged ({reason(error)}); fetch it again.") from None


def checksum(array: np.ndarray) -> int:
    """CRC-32 of an array's bytes. Among the formats' own checks, only gzip's detects a changed byte."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def check(name: str, array: np.ndarray, expected: int | None) -> None:
    """Raises ValueError if an array does not have the `expected` checksum, unless that is None."""
    if expected is not None and checksum(array) != expected:
        raise ValueError(
            f"{name} holds values other than those written (its checksum differs): the file is "
            "damaged, fetch it again."
        )


CHUNK = 2**20
"""The largest stored chunk of an array, in bytes."""
Index = tuple[slice, ...]
"""A box of an array: a slice along each axis."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array in a file that is read in parts, on demand."""

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[Index], np.ndarray]

    def __getitem__(self, index: Index) -> np.ndarray:
        return self.read(index)

    @property
    def T(self) -> "Stored":
        return Stored(self.shape[::-1], self.dtype, lambda index: self.read(index[::-1]).T)

    def whole(self) -> np.ndarray:
        return self.read((slice(None),) * len(self.shape))


@dataclasses.dataclass(frozen=True)
class Placement:
    """How parameters are placed on the devices: their dtype, their sharding, and whether kernels are packed
    for decoding. With int8, kernels are packed and everything else is bfloat16."""

    dtype: Any = jnp.float32
    sharding: Sharding | None = None
    packed: bool = False
    track: Callable[[Iterable[Any], int], Iterable[Any]] | None = None
    """Shows progress: track(arrays, number of arrays) yields the arrays as they are read."""

    def takes_part(self, path: ParameterPath, shape: tuple[int, ...]) -> bool:
        """Whether this process's devices hold only a part of a parameter, which can be converted without the
        rest."""
        if self.sharding is None or jnp.dtype(self.dtype) == jnp.int8:  # its scales need whole columns
            return False
        where = self.sharding(path, shape)
        return not (where.is_fully_addressable or where.is_fully_replicated)

    def __call__(
        self, path: ParameterPath, array: np.ndarray | Stored, tied: bool
    ) -> jax.Array | PackedKernel:
        """Places a host array on the devices. `tied`: the embedding is also the kernel of the logits.
        Integers are not converted."""
        if isinstance(array, Stored):
            return self._parts(path, array, tied)
        if jnp.issubdtype(array.dtype, jnp.integer):
            where = None if self.sharding is None else self.sharding(path, array.shape)
            return put(array.astype(np.int32), where)
        wanted = self.described(path, array.shape, tied)
        made: Any = array
        if isinstance(wanted, PackedKernel):
            table = path[-1] == "embedding"
            made = pack(array.T if table else array, self.dtype, wanted.transposed)
        return jax.tree.map(lambda x, to: put(x.astype(to.dtype, copy=False), to.sharding), made, wanted)

    def _parts(self, path: ParameterPath, array: Stored, tied: bool) -> jax.Array | PackedKernel:
        """The parts of an array that this process holds (see takes_part()), converted as by __call__()."""
        wanted = self.described(path, array.shape, tied)
        if not isinstance(wanted, PackedKernel):
            return put_parts(array, wanted.sharding, wanted.dtype)
        kernel = array.T if path[-1] == "embedding" else array
        values = kernel.T if wanted.transposed else kernel
        where = wanted.values
        return PackedKernel(put_parts(values, where.sharding, where.dtype), None, wanted.transposed)

    def described(self, path: ParameterPath, shape: tuple[int, ...], tied: bool) -> Any:
        """The shapes and shardings of the result of __call__() for an array of that shape, possibly with a
        leading axis of layers."""
        where = None if self.sharding is None else self.sharding(path, shape)
        every, whole = tuple(range(len(shape))), jnp.dtype(self.dtype) == jnp.int8

        def part(axes: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            at = where
            if isinstance(where, NamedSharding) and axes != every:
                spec = (*where.spec, *[None] * len(shape))
                at = NamedSharding(where.mesh, P(*(spec[n] for n in axes)))
            return jax.ShapeDtypeStruct(tuple(shape[n] for n in axes), dtype, sharding=at)

        table = tied and path[-1] == "embedding"
        if not (self.packed or whole) or not (table or path[-1] == "kernel"):
            return part(every, jnp.bfloat16 if whole else self.dtype)
        *layers, inputs, outputs = (1, 0) if table else every
        transposed = table or turned(shape[inputs])
        return PackedKernel(
            part((*layers, outputs, inputs) if transposed else every, self.dtype),
            part((*layers, outputs), jnp.float32) if whole else None,
            transposed,
        )


def check_order(name: str, array: np.ndarray, vocab_size: int) -> None:
    """Raises ValueError unless an array is a permutation of its indices."""
    if not np.issubdtype(array.dtype, np.integer) or (np.sort(array) != np.arange(array.size)).any():
        raise ValueError(
            f"{name} does not hold each number below {array.size} once: the file is damaged, fetch it again."
        )


def check_offsets(name: str, array: np.ndarray, vocab_size: int) -> None:
    """Raises ValueError unless an array, added to its indices, gives distinct tokens."""
    tokens = array + np.arange(array.size) if np.issubdtype(array.dtype, np.integer) else np.full(1, -1)
    if tokens.min() < 0 or tokens.max() >= vocab_size or np.unique(tokens).size != array.size:
        raise ValueError(
            f"{name} does not lead to {array.size} different tokens of {vocab_size}: the file is damaged or "
            "another model's, fetch it again."
        )


WHOLE_NUMBERS: dict[Any, Callable[[str, np.ndarray, int], None]] = {
    "order": check_order,
    "offsets": check_offsets,
}
"""The check(name, array, vocab_size) of an integer array, by the last part of its path."""


def head_of(path: ParameterPath) -> ParameterPath:
    """The path of the untied head that belongs to the embedding at `path`."""
    return *path[:-1], "head", "kernel"


def put(array: np.ndarray, where: jax.sharding.Sharding | None) -> jax.Array:
    """Puts an array on the devices, each of which gets only its part.

    The copy is complete when this returns; otherwise JAX would copy in the background and hold several arrays
    at once.
    """
    if where is None:
        return jax.block_until_ready(jnp.asarray(array))
    return jax.block_until_ready(jax.make_array_from_callback(array.shape, where, lambda part: array[part]))


def put_parts(array: Stored, where: jax.sharding.Sharding, dtype: Any) -> jax.Array:
    """Puts an array in `dtype` on the devices. This process reads only what its devices hold: in one piece if
    that is a box, else part by part."""
    places = where.addressable_devices_indices_map(array.shape).values()
    parts = {ends_of(index, array.shape) for index in places if index is not None}
    axes = [[*zip(*axis, strict=True)] for axis in zip(*parts, strict=True)]
    box = tuple((min(low), max(high)) for low, high in axes)
    if size_of(box) == sum(map(size_of, parts)):
        parts = {box}
    read = {part: array[tuple(slice(*ends) for ends in part)].astype(dtype) for part in parts}

    def held(index: Any) -> np.ndarray:
        ends = ends_of(index, array.shape)
        part = ends if ends in read else box
        inside = (slice(a - low, b - low) for (a, b), (low, _) in zip(ends, part, strict=True))
        return read[part][tuple(inside)]

    return jax.block_until_ready(jax.make_array_from_callback(array.shape, where, held))


def ends_of(index: Index, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The start and end of a box along each axis of an array."""
    return tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))


def size_of(ends: Iterable[tuple[int, int]]) -> int:
    """The number of entries of a box."""
    return math.prod(end - begin for begin, end in ends)


def finite(name: str, array: np.ndarray | Stored) -> np.ndarray | Stored:
    """Returns the array. Raises ValueError if it, or a part that is read, contains NaN or infinity."""
    if isinstance(array, Stored):
        read = array.read
        return dataclasses.replace(array, read=lambda index: np.asarray(finite(name, read(index))))
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds values that are not finite: the file is damaged, fetch it again.")
    return array


def to_params(
    model: Model, arrays: Iterable[tuple[ParameterPath, str, np.ndarray | Stored]], place: Placement
) -> nnx.State:
    """The model's parameters from (path, name in the file, array) triples.

    Only one host array is alive at a time if `arrays` keeps none. Raises ValueError for integers, NaN and
    infinity; in a file without checksums, nothing more can be checked.
    """
    params = model.abstract_params()
    flat = dict(nnx.to_flat_state(params))
    for path, name, array in arrays if place.track is None else place.track(arrays, len(flat)):
        if jnp.issubdtype(flat[path].get_value().dtype, jnp.integer):
            WHOLE_NUMBERS[path[-1]](name, np.asarray(array), model.vocab_size)
        elif not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} holds {array.dtype} values; only floating-point weights are read.")
        array = finite(name, array)
        flat[path] = flat[path].replace(place(path, array, head_of(path) not in flat))
        del array
    nnx.update(params, nnx.from_flat_state(flat))
    return params
