"""Output files that an interrupted run goes on with."""

import json
from pathlib import Path
from typing import Any, TextIO

from speccascade_jax.inference.text import Output


def whole_lines(path: Path) -> int:
    """The number of finished lines of a file that a killed run was writing; cuts the rest off."""
    if not path.is_file():
        return 0
    with path.open("r+b") as file:
        count, end = 0, 0
        for line in file:
            if line.endswith(b"\n"):
                count, end = count + 1, end + len(line)
        file.truncate(end)
    return count


def resume_lines(path: Path, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], TextIO]:
    """The whole JSON lines of a file that a killed run has left, and the file, open for more.

    PATH.settings.json keeps what they were made of. Raises ValueError where that is not `settings`.
    """
    kept = Path(f"{path}.settings.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(kept.read_text()) if kept.is_file() else None
        if path.is_file() and path.stat().st_size and before != json.loads(json.dumps(settings)):
            raise ValueError(f"{path} holds results of other settings (see {kept}): delete it or choose "
                             "another --output.")
        kept.write_text(json.dumps(settings, indent=1) + "\n")
        whole_lines(path)  # cut in place: another kill here loses nothing
        file = path.open("a+", encoding="utf-8")
        file.seek(0)
        return [json.loads(line) for line in file], file
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot go on with {path}: {error}; delete it or choose another --output."
                         ) from None


def writable(path: Path) -> None:
    try:
        path.touch()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}.") from None


def open_output(path: Path, settings: dict[str, Any], texts: list[str]) -> tuple[TextIO, list[Output]]:
    """The output file, open for appending, and the outputs that an interrupted run left in it.

    Another run's lines are never mixed in: neither of other settings nor of other inputs.
    """
    writable(path)
    lines, file = resume_lines(path, settings)
    try:
        done = [Output(**line) for line in lines]
    except TypeError:
        raise ValueError(f"{path} holds lines that are no outputs: delete it or choose another --output."
                         ) from None
    for number, output in enumerate(done, 1):
        if number > len(texts) or output.source != texts[number - 1]:
            raise ValueError(f"{path}, line {number}, has another source than the input: delete the file or "
                             "choose another --output.")
    return file, done
