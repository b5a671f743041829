"""Texts from files."""

import gzip
import json
import os
import reprlib
import stat
import sys
import zlib
from pathlib import Path
from typing import Any

BOM = b"\xef\xbb\xbf"


def read_lines(path: str | Path, data: bytes | None = None) -> list[str]:
    """The lines of a text file, gzipped or not, or of `data` that came from `path`.

    A byte order mark is left out. Raises ValueError with file and line on bad UTF-8.
    """
    try:
        data = read_bytes(path) if data is None else data
        data = gzip.decompress(data) if str(path).endswith(".gz") else data
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    lines = data.removeprefix(BOM).split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    decoded = []
    for number, line in enumerate(lines, 1):
        try:
            decoded.append(line.decode("utf-8").rstrip("\r"))
        except UnicodeDecodeError:
            raise ValueError(f"{path}, line {number}: not valid UTF-8; convert the file first "
                             "(iconv -f latin1 -t utf-8).") from None
    return decoded


def read_bytes(path: str | Path) -> bytes:
    """A file's bytes. Devices are refused: /dev/zero never ends."""
    with open(path, "rb") as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode) and not file.isatty():
            raise OSError("it is a device, not a file")
        return file.read()


def parse_json(line: str, where: str) -> Any:
    """What a line of JSON holds. Raises ValueError that begins with `where`."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError(f"{where}: JSON that is nested too deeply.") from None
    except ValueError as error:  # a syntax error, or a number of thousands of digits
        raise ValueError(f"{where}: not JSON ({error}).") from None


def check_text(text: Any, where: str) -> str:
    """`text`, which must be a string that UTF-8 can hold. Raises ValueError that begins with `where`."""
    if not isinstance(text, str):
        raise ValueError(f"{where} is {reprlib.repr(text)}; it must be a text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds {text[error.start]!a}, half a character, which UTF-8 has no place "
                         "for: mend or drop it.") from None
    return text


def read_texts(path: str) -> list[str]:
    """The texts of a .txt (a line each) or a .jsonl (the field `source`), either gzipped; `-` is stdin.

    Raises ValueError with the line's number.
    """
    if path != "-":
        lines = read_lines(path)
    elif sys.stdin is None:
        raise ValueError("standard input is closed: give --input another file than -.")
    else:
        lines = read_lines("stdin", sys.stdin.buffer.read())
    if not path.removesuffix(".gz").endswith(".jsonl"):
        return lines
    texts = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        example = parse_json(line, where)
        if not isinstance(example, dict) or "source" not in example:
            raise ValueError(f"{where}: not a JSON object with a `source`.")
        texts.append(check_text(example["source"], f"{where}: `source`"))
    return texts
