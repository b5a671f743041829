"""Output files: an interrupted run resumes them, and only one process at a time writes them.

A run that resumes:

    lines, file = resume(path, settings)
    with file:
        for line in work[len(lines):]:
            file.add(line)
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import reprlib
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from speccascade_jax.cluster import Job
from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference.inputs import check_text, parse_json
from speccascade_jax.inference.text import Output

T = TypeVar("T")
ORIGINS = ("draft", "correction", "bonus", "model")
REMEDY = "delete it or choose another --output"
LARGEST_SETTINGS = 2**22  # bytes of a config's fields and its texts


class OutputFile:
    """A file of JSON lines, open for appending, that no other process can write at the same time.

    Raises ValueError if another one does (unless told to `wait`), OSError if it cannot be opened. The
    lock is the kernel's: it is released when the process ends. File systems without locks have no protection.
    """

    def __init__(self, path: Path, wait: bool = False):
        self.path = path
        while True:
            _check_regular(path)
            self.made = [] if os.path.lexists(path) else [path]  # removed if the first line fails
            self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                _lock(self.handle, path, wait)
                # Between opening and locking, another process may have finished with the file and moved it.
                if os.path.exists(path) and os.path.samestat(os.fstat(self.handle), os.stat(path)):
                    return
            except BaseException:
                self.close()
                raise
            self.close()

    def read(self) -> bytes:
        with open(self.handle, "rb", closefd=False) as file:
            file.seek(0)
            return file.read()

    def add(self, line: Any) -> None:
        """Writes `line` as JSON and flushes it."""
        self.write(json.dumps(line, ensure_ascii=False) + "\n")

    def write(self, lines: str) -> None:
        """Writes whole lines."""
        data = lines.encode()
        try:
            while data:
                data = data[os.write(self.handle, data) :]
        except OSError as error:  # the error does not name the file
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def remove(self) -> None:
        """Deletes the file and its settings once they are no longer needed."""
        for path in (settings_file(self.path), self.path):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self.made and self._is_empty():
            for path in self.made:
                path.unlink(missing_ok=True)
        self.close()

    def _is_empty(self) -> bool:
        """Whether the file is empty and still has its name."""
        return (
            self.handle >= 0
            and os.fstat(self.handle).st_size == 0
            and self.path.exists()
            and os.path.samestat(os.fstat(self.handle), os.stat(self.path))
        )


def _lock(handle: int, path: Path, wait: bool) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FieldError(
            "output",
            str(path),
            "wait for its end, or choose another --output.",
            f"{path} is being written by another process",
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise


def _check_regular(path: Path, field: str = "output") -> None:
    """Raises FieldError if `path` is not a regular file; /dev/full, for example, reads without end."""
    mode = path.stat().st_mode if path.exists() else stat.S_IFREG
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise FieldError(field, str(path), "name a file.", f"cannot write {path}: it is {what}")


def settings_file(path: str | Path) -> Path:
    """The file in which `resume` keeps the settings of the lines of `path`."""
    return Path(f"{path}.settings.json")


def resume(
    path: str | Path, settings: dict[str, Any], read: Callable[[int, Any], T] | None = None
) -> tuple[list[T], OutputFile]:
    """The complete lines that an interrupted run left in a file of JSON lines, and the file, open for
    appending.

    settings: the settings that determine the lines; they are kept next to the file, so that lines of other
    settings are never mixed in. read(number, line) parses a line; it raises ValueError if the line is
    damaged.

    An incomplete last line, which a kill leaves, is removed. Raises ValueError for other damage or other
    settings, and leaves the file unchanged.
    """
    path, kept = Path(path), settings_file(path)
    settings = json.loads(json.dumps(settings))
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _check_regular(kept)
            file = stack.enter_context(OutputFile(path))
            *whole, rest = file.read().split(b"\n")
            if whole or rest:
                _check_settings(path, kept, settings)
            lines = [_line(path, number, line, read) for number, line in enumerate(whole, 1)]
            if rest:
                os.truncate(file.handle, sum(map(len, whole)) + len(whole))
            if not whole:
                _check_replaceable(path, kept, settings)
                write_whole(kept, json.dumps(settings, indent=1) + "\n")
                if file.made:
                    file.made.append(kept)
        except OSError as error:
            raise FieldError(
                "output",
                str(path),
                "choose another place.",
                f"cannot write {error.filename or path}: {error.strerror}",
            ) from None
        stack.pop_all()  # the caller closes the file
        return lines, file


def _check_settings(path: Path, kept: Path, settings: dict[str, Any]) -> None:
    if not kept.is_file():
        raise FieldError(
            "output",
            str(path),
            f"{REMEDY}.",
            f"{path} exists without {kept.name}, the record of its settings",
        )
    before = _settings_in(kept)
    if before != settings:
        known = before or {}
        names = sorted(k for k in {*known, *settings} if known.get(k, ...) != settings.get(k, ...))
        raise FieldError(
            "output",
            str(path),
            f"{REMEDY}.",
            f"{path} has results of other settings (see {', '.join(names)} in {kept})",
        )


def _settings_in(kept: Path) -> dict[str, Any] | None:
    """The content of a settings file; None for any other file."""
    if kept.stat().st_size > LARGEST_SETTINGS:
        return None
    try:
        content = parse_json(kept.read_text(errors="replace"), str(kept))
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _check_replaceable(path: Path, kept: Path, settings: dict[str, Any]) -> None:
    """Raises FieldError if the file in the settings' place is not a settings file: any version has most of
    these names."""
    if kept.exists():
        names = (_settings_in(kept) or {}).keys()
        if 2 * len(names & settings.keys()) < max(len(settings), 1):
            raise FieldError(
                "output",
                str(path),
                "move that file, or choose another --output.",
                f"{kept}, the file for the settings of --output, is a different file",
            )


def _line(path: Path, number: int, line: bytes, read: Callable[[int, Any], T] | None) -> Any:
    where = f"{path}, line {number}: "
    try:
        value = parse_json(line.decode(), where[:-2])
        if read is not None:
            return read(number, value)
        if not isinstance(value, dict):
            raise ValueError(f"no JSON object but {reprlib.repr(value)}")
        return value
    except ValueError as error:  # including invalid UTF-8
        raise FieldError(
            "output", str(path), f"{REMEDY}.", f"{where}{str(error).removeprefix(where).rstrip('.')}"
        ) from None


def open_output(
    path: str | Path, settings: dict[str, Any], texts: Sequence[str], first_index: int = 0
) -> tuple[OutputFile, list[Output]]:
    """The file for the outputs of `texts`, and the outputs that an interrupted run left in it."""

    def read(number: int, line: Any) -> Output:
        output = output_of(line)
        if number > len(texts) or output.source != texts[number - 1]:
            raise ValueError("another source than the input's")
        if output.index != first_index + number - 1:
            raise ValueError(f"index {output.index}, not {first_index + number - 1}")
        return output

    done, file = resume(path, settings, read)
    return file, done


def resumed_by(
    job: Job, stack: contextlib.ExitStack, opened: Callable[[], tuple[OutputFile, list[Output]]] | None
) -> tuple[OutputFile | None, list[Output], int]:
    """The file that the first process of a job has `opened` (see open_output) on the stack, its outputs, and
    their number. The other processes have no file, and get only the number."""
    file, outputs = None, list[Output]()

    def count() -> int:
        nonlocal file, outputs
        if opened is not None:
            file, outputs = opened()
            stack.enter_context(file)
        return len(outputs)

    resumed = job.share(count)
    return file, outputs, resumed


def output_of(line: Any) -> Output:
    """The Output in a line of JSON. Raises ValueError if it is not one."""
    names = [field.name for field in dataclasses.fields(Output)]
    if not isinstance(line, dict) or line.keys() != set(names):
        raise ValueError(f"no output, which has the fields {', '.join(names)}")
    tokens, origin, counts = line["tokens"], line["origin"], line["counts"]
    for name in ("source", "text"):
        check_text(line[name], name)
    if not _is_count(line["index"]):
        raise ValueError(f"index is {reprlib.repr(line['index'])}")
    if not isinstance(tokens, list) or not all(map(_is_count, tokens)):
        raise ValueError("tokens are not a list of whole numbers")
    if not isinstance(origin, list) or len(origin) != len(tokens) or any(o not in ORIGINS for o in origin):
        raise ValueError(f"origin does not name who wrote each token ({', '.join(ORIGINS)})")
    level = line["level"]
    if not isinstance(level, list) or len(level) != len(tokens) or not all(map(_is_count, level)):
        raise ValueError("level does not number the model that wrote each token")
    if not isinstance(line["truncated"], bool):
        raise ValueError(f"truncated is {reprlib.repr(line['truncated'])}")
    if not _are_counts(counts):
        raise ValueError("counts are not whole numbers")
    if bool(tokens) != bool(counts):
        raise ValueError(f"{len(tokens)} tokens, but {len(counts)} counts")
    return Output(**line)


def _are_counts(counts: Any) -> bool:
    """Numbers, lists of numbers, and under "below" the counts of each smaller model of a hierarchy."""
    return isinstance(counts, dict) and all(
        all(map(_are_counts if name == "below" else _is_count, value))
        if isinstance(value, list)
        else _is_count(value)
        for name, value in counts.items()
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def write_whole(path: str | Path, text: str) -> None:
    """Writes a file atomically: an existing file at `path` remains until all of `text` is written. Raises an
    OSError that names the file.
    """
    path = Path(os.path.realpath(path))  # keeps symbolic links
    _check_regular(path)
    new = path.with_name(f".{path.name[:100]}.{os.getpid()}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def append_line(path: str | Path, line: Any) -> None:
    """Appends a line of JSON to a file that several processes may append to. Raises an OSError that names
    it."""
    with OutputFile(Path(path), wait=True) as file:
        size = os.fstat(file.handle).st_size
        if size and os.pread(file.handle, 1, size - 1) != b"\n":  # a partial line, from a kill
            file.write("\n")
        file.add(line)


def check_targets(written: Mapping[str, str | Path | None], read: Mapping[str, str | Path | None]) -> None:
    """Raises ValueError unless every file to be written is writable and differs from all others that are
    written or read, under any name. Both arguments map flags to paths; None is skipped.
    """
    flags: dict[Any, str] = {}
    for flag, path in read.items():
        flags |= dict.fromkeys(_names(path), flag)
    for flag, path in written.items():
        if path is None:
            continue
        _check_writable(_field(flag), Path(path))
        for name in _names(path):
            if name in flags:
                raise FieldError(
                    _field(flag),
                    str(path),
                    "choose another one.",
                    f"{flag} is {path}, the same file as {flags[name]}",
                )
        flags |= dict.fromkeys(_names(path), flag)


def _field(flag: str) -> str:
    """The field of a flag, such as "--output" or "the settings of --output"."""
    return flag.rpartition("--")[2].replace("-", "_")


def _names(path: str | Path | None) -> list[Any]:
    """Identities that two paths of one file share: the resolved path, and the file itself."""
    if path is None:
        return []
    real = os.path.realpath(path)
    if not os.path.exists(real):
        return [real]
    return [real, (os.stat(real).st_dev, os.stat(real).st_ino)]


def _check_writable(field: str, path: Path) -> None:
    """Does not open the file, so that a check leaves no empty file."""
    real = Path(os.path.realpath(path))
    try:
        _check_regular(path, field)
        if not real.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"there is no folder {real.parent}")
        if not os.access(real.parent, os.W_OK | os.X_OK) or (real.exists() and not os.access(real, os.W_OK)):
            raise PermissionError(errno.EACCES, "permission denied")
    except OSError as error:
        raise FieldError(
            field, str(path), "choose another place.", f"cannot write {path}: {error.strerror}"
        ) from None
