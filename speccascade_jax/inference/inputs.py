"""Texts from files."""

import gzip
from pathlib import Path


def read_lines(path: str | Path, data: bytes | None = None) -> list[str]:
    """The lines of a text file, gzipped or not, or of `data` that came from `path`.

    Raises ValueError with file and line on bad UTF-8.
    """
    try:
        data = Path(path).read_bytes() if data is None else data
        data = gzip.decompress(data) if str(path).endswith(".gz") else data
    except (OSError, EOFError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    lines = data.split(b"\n")
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
