"""Reads pytorch_model.bin, a zip archive of arrays with a pickle that describes them.

Unpickling a file can run arbitrary code. So the file is not unpickled: the few operations with which
torch.save() writes a dictionary of tensors are interpreted as data, and a file with any other is refused.
"""

import math
import pickletools
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np

from speccascade_jax.checkpoints.files import JSON_BYTES, shown

STORAGES: dict[str, Any] = {
    "torch FloatStorage": np.float32,
    "torch HalfStorage": np.float16,
    "torch BFloat16Storage": ml_dtypes.bfloat16,
    "torch DoubleStorage": np.float64,
    "torch LongStorage": np.int64,
    "torch IntStorage": np.int32,
    "torch BoolStorage": np.bool_,
}
DICTIONARY, TENSOR, PARAMETER = (
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
)
BROKEN = zipfile.BadZipFile, StopIteration, NotImplementedError, RuntimeError, EOFError, struct.error
"""The exceptions that a damaged archive raises."""
VALUES = "BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"
CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Name(NamedTuple):
    """A function that a pickle refers to by module and name."""

    text: str


class Storage(NamedTuple):
    """An array's file in the archive."""

    dtype: Any
    key: str


class Tensor(NamedTuple):
    """A part of a storage."""

    storage: Storage
    begin: int
    shape: tuple[int, ...]


class TorchFile:
    """A file of torch.save() that contains a dictionary of tensors, with the interface of safetensors'
    safe_open. Raises ValueError for anything else."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.archive = zipfile.ZipFile(path)
            name = next(name for name in self.archive.namelist() if name.endswith("/data.pkl"))
            self.root = name.removesuffix("data.pkl")
            content = tensors_of(self.member("data.pkl", JSON_BYTES))
        except BROKEN as error:
            raise ValueError(f"no archive of torch.save(): {error!r}") from None
        self.tensors = {
            name: value
            for name, value in content.items()
            if isinstance(value, Tensor) and isinstance(name, str)
        }

    def __enter__(self) -> "TorchFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.archive.close()

    def member(self, name: str, limit: int) -> bytes:
        """The content of a file in the archive, of at most `limit` bytes."""
        info = self.archive.NameToInfo.get(self.root + name)
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size > limit:
            raise ValueError(f"{shown(name)} is missing in the archive, compressed or too large")
        return self.archive.read(info)

    def keys(self) -> Iterable[str]:
        return self.tensors.keys()

    def get_slice(self, name: str) -> "TorchFile.Slice":
        return TorchFile.Slice(self.tensors[name].shape)

    def get_tensor(self, name: str) -> np.ndarray:
        (dtype, key), begin, shape = self.tensors[name]
        info = self.archive.NameToInfo.get(f"{self.root}data/{key}")
        values = np.frombuffer(self.member(f"data/{key}", info.file_size if info else 0), dtype)
        count = math.prod(shape)
        if begin + count > values.size:
            raise ValueError(f"its storage has {values.size} values")
        return values[begin : begin + count].reshape(shape)

    def metadata(self) -> dict[str, str]:
        return {}

    class Slice(NamedTuple):
        shape: tuple[int, ...]

        def get_shape(self) -> tuple[int, ...]:
            return self.shape


def tensors_of(pickled: bytes) -> dict[str, Any]:
    """The dictionary in a pickle by torch.save(). Raises ValueError for any other pickle."""
    stack, marks, memo = list[Any](), list[int](), dict[int, Any]()

    def taken(count: int) -> tuple[Any, ...]:
        values = tuple(stack[len(stack) - count :])
        del stack[len(stack) - count :]
        return values

    try:
        for operation, argument, _ in pickletools.genops(pickled):
            name, value = operation.name, cast(Any, argument)
            if name in VALUES:
                stack.append(value)
            elif name in CONSTANTS:
                stack.append(CONSTANTS[name])
            elif name in TUPLES:
                stack.append(taken(TUPLES[name]))
            elif name == "MARK":
                marks.append(len(stack))
            elif name == "TUPLE":
                stack.append(taken(len(stack) - marks.pop()))
            elif name == "EMPTY_DICT":
                stack.append({})
            elif name == "SETITEM":
                stack[-3].update([taken(2)])
            elif name == "SETITEMS":
                items = taken(len(stack) - marks.pop())
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[value] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[value])
            elif name == "GLOBAL":
                stack.append(Name(value))
            elif name == "BINPERSID":
                (kind, storage, key, *_) = stack.pop()
                if kind != "storage" or not isinstance(key, str):
                    raise ValueError(f"it refers to {shown(kind)}")
                stack.append(Storage(STORAGES[storage.text], key))
            elif name == "REDUCE":
                stack.append(made(*taken(2)))
            elif name == "BUILD":
                stack.pop()  # the dictionary's attributes: versions of torch's modules
            elif name == "STOP":
                if not isinstance(stack[-1], dict):
                    break
                return stack[-1]
            elif name != "PROTO":
                raise ValueError(f"it has the operation {name}, which no dictionary of tensors needs")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"its pickle is damaged, or not a dictionary of tensors ({error!r})") from None
    raise ValueError("its pickle is not a dictionary of tensors")


def made(name: Name, values: tuple[Any, ...]) -> Any:
    """The result of a call in a pickle. Raises ValueError for anything except dictionaries and tensors."""
    if name.text == DICTIONARY and not values:
        return {}
    if name.text == PARAMETER:
        return values[0]
    if name.text != TENSOR:
        raise ValueError(f"it calls {shown(name.text)}, which is not done")
    storage, begin, shape, strides, *_ = values
    usual = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    strange = [n for n in (begin, *shape) if type(n) is not int or n < 0]
    if (
        not isinstance(storage, Storage)
        or strange
        or any(
            size > 1 and stride != wanted for size, stride, wanted in zip(shape, strides, usual, strict=True)
        )
    ):
        raise ValueError("a tensor's values do not lie one after the other")
    return Tensor(storage, begin, tuple(shape))
