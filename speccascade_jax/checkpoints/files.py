"""Reads files from untrusted sources: only regular files of a plausible size, with errors of one sentence.

Opening a named pipe blocks, reading a device never ends, and a sparse file of a terabyte takes no disk space,
so paths are checked before they are opened.
"""

import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any

MEGABYTE = 2**20
JSON_BYTES = 64 * MEGABYTE  # the index of a model with 400 billion parameters has one megabyte
HEADERS = ".z", "_", "manifest"
"""Prefixes of the names of zarr, Orbax and TensorStore files without arrays."""


def shown(value: Any) -> str:
    """A value from a file for an error message: shortened and printable."""
    return reprlib.repr(value)


def checked_path(path: str | Path) -> Path:
    """Returns the path. Raises ValueError if it is invalid."""
    text = str(path)
    try:
        longest = max(len(part.encode()) for part in text.split("/"))
    except UnicodeEncodeError:
        raise ValueError(f"the path {shown(text)} is not valid UTF-8: rename it.") from None
    if "\0" in text or longest > 255 or len(text) > 4000:
        raise ValueError(f"{shown(text)} cannot be a path: it is too long, or has a null character in it.")
    return Path(path)


def exists(path: Any) -> bool:
    """Whether anything exists at `path` (local or remote). Raises ValueError if access is denied."""
    try:
        return path.exists()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}.") from None


def check_regular(path: Path, limit: int | None = None) -> None:
    """Raises ValueError if `path` is missing, unreadable or not a regular file, or has more than `limit`
    bytes."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}.") from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file: put the checkpoint's own file in its place.")
    if not os.access(path, os.R_OK):  # safetensors would report it as missing
        raise ValueError(f"cannot read {path}: Permission denied.")
    if limit is not None and status.st_size > limit:
        raise ValueError(
            f"{path} has {status.st_size:,} bytes, no file of its kind more than {limit:,}: fetch it again."
        )


def read(path: Any, limit: int) -> bytes:
    """The content of a local or remote file of at most `limit` bytes. Raises ValueError."""
    if isinstance(path, Path):
        check_regular(path, limit)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}.") from None


def parse_json(name: Any, content: bytes) -> dict[str, Any]:
    """Parses the object in a JSON file `name`. Raises ValueError if it is damaged or nested too deep."""
    try:
        parsed = json.loads(content)
    except RecursionError:
        raise ValueError(f"{name} is damaged (nested too deep): fetch it again.") from None
    except ValueError as error:  # invalid JSON or UTF-8, or a number with more than 4,300 digits
        raise ValueError(f"{name} is damaged ({str(error).split(';')[0]}): fetch it again.") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{name} is damaged (it holds {shown(parsed)}, no object): fetch it again.")
    return parsed


def read_json(path: Any) -> dict[str, Any]:
    """The object in a JSON file, local or remote. Raises ValueError if it is missing or damaged."""
    return parse_json(path, read(path, JSON_BYTES))


def check_folder(folder: Path) -> None:
    """Raises ValueError if `folder` contains anything but folders and regular files, or a large header,
    because the libraries that read arrays open every file and read whole headers."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}.") from None

    for where, _, names in os.walk(folder, onerror=refuse):
        for name in names:
            check_regular(Path(where, name), JSON_BYTES if name.startswith(HEADERS) else None)
