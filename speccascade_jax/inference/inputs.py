"""Texts from files."""

import contextlib
import gzip
import itertools
import json
import os
import reprlib
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

BOM = b"\xef\xbb\xbf"
LONGEST_LINE = 2**22
"""The largest line, in bytes: about a million tokens, more than any model reads."""


def read_lines(path: str | Path) -> Iterator[str]:
    """Yields the lines of a text file, optionally gzipped; `-` is stdin.

    A byte order mark is removed. Raises ValueError with the file and line for invalid UTF-8 and for a line of
    more than LONGEST_LINE bytes.
    """
    name = "stdin" if path == "-" else path
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(_opened(path))
            if str(path).endswith(".gz"):
                file = stack.enter_context(gzip.GzipFile(fileobj=file))
            yield from _decoded(file, str(name))
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {name}: {error}") from None


def _decoded(file: Any, name: str) -> Iterator[str]:
    for number in itertools.count(1):
        line = file.readline(LONGEST_LINE + 2)  # plus the line end
        if len(line.rstrip(b"\r\n")) > LONGEST_LINE:
            raise ValueError(f"{name}, line {number}: longer than {LONGEST_LINE:,} bytes; split it.")
        ended = line.endswith(b"\n")
        text = line.removeprefix(BOM) if number == 1 else line
        if not ended and not text:
            return
        try:
            yield text.removesuffix(b"\n").decode("utf-8").rstrip("\r")
        except UnicodeDecodeError:
            raise ValueError(
                f"{name}, line {number}: not valid UTF-8; convert the file first (iconv -f latin1 -t utf-8)."
            ) from None


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    """Opens a file or stdin for reading bytes. Refuses devices, because /dev/zero never ends."""
    if path == "-":
        if sys.stdin is None:
            raise ValueError("standard input is closed: give --input another file than -.")
        yield sys.stdin.buffer
        return
    with open(path, "rb") as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode) and not file.isatty():
            raise OSError("it is a device, not a file")
        yield file


def parse_json(line: str, where: str) -> Any:
    """Parses a line of JSON. Raises a ValueError that begins with `where`."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError(f"{where}: JSON that is nested too deeply.") from None
    except ValueError as error:  # a syntax error, or a number with thousands of digits
        raise ValueError(f"{where}: not JSON ({error}).") from None


def check_text(text: Any, where: str) -> str:
    """Returns `text` if it is a string that UTF-8 can encode. Raises a ValueError that begins with `where`
    otherwise."""
    if not isinstance(text, str):
        raise ValueError(f"{where} is {reprlib.repr(text)}; it must be a text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} holds {text[error.start]!a}, an unpaired surrogate, which UTF-8 cannot "
            "encode: correct or remove it."
        ) from None
    return text


def read_texts(path: str, limit: int | None = None, fields: Sequence[str] = ("source",)) -> list[str]:
    """The first `limit` texts of a .txt file (one per line) or .jsonl file (the first of `fields` that an
    object has), optionally gzipped; `-` is stdin. The rest of the file is not read.

    Raises ValueError with the line number.
    """
    lines = itertools.islice(read_lines(path), limit)
    if not path.removesuffix(".gz").endswith(".jsonl"):
        return list(lines)
    texts = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        example = parse_json(line, where)
        name = next((name for name in fields if isinstance(example, dict) and name in example), None)
        if name is None:
            known = " or a ".join(f"`{name}`" for name in fields)
            raise ValueError(f"{where}: not a JSON object with a {known}.")
        texts.append(check_text(example[name], f"{where}: `{name}`"))
    return texts
