"""Checks of a tokenizer.json before the tokenizers library reads it.

The library trusts the file: a padding of 10**18 tokens, a template without the text or a damaged character
table aborts the process or raises something that is not an Exception. So the file is checked in Python first.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from speccascade_jax.checkpoints.files import shown

T = TypeVar("T")
LARGEST_ID = 2**24
"""Larger than any vocabulary: the largest have 2**18 tokens."""
LARGEST_STRIP = 1000
"""Most characters that a decoder may strip at either end of a token."""

LONGEST_ERROR = 300
"""Most characters of the library's error that are shown."""


def checked_content(described: Mapping[str, Any]) -> str:
    """The file's contents for the library, without truncation and padding, which the caller does, and without
    BPE dropout, which would tokenize a text differently each time.

    Raises RuntimeError if reading it would end the process.
    """
    for part in _parts(described):
        _check_ids(part)
        if "precompiled_charsmap" in part:
            _check_charsmap(part["precompiled_charsmap"])
        if part.get("type") == "TemplateProcessing":
            _check_template(part)
        if part.get("type") == "Strip":
            _check_strip(part)
    content = {**described, "truncation": None, "padding": None}
    if isinstance(model := described.get("model"), dict) and "dropout" in model:
        content["model"] = {**model, "dropout": None}
    return json.dumps(content)


def guarded(work: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Calls a function of the library. Raises RuntimeError for anything that it raises, because a panic is
    not an Exception and an error may quote the whole file."""
    try:
        return work(*arguments, **options)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        said = " ".join(str(error).split())
        raise RuntimeError(said if len(said) <= LONGEST_ERROR else f"{said[:LONGEST_ERROR]} ...") from None


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a JSON value except vocabularies, whose keys are tokens."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            yield value
            stack.extend(
                child
                for name, child in value.items()
                if isinstance(child, dict | list) and name not in ("vocab", "merges")
            )
        elif isinstance(value, list):
            stack.extend(child for child in value if isinstance(child, dict | list))


def _check_ids(part: Mapping[str, Any]) -> None:
    """Checks the ids of a vocabulary ({token: id}), of added tokens ("id") and of a template's special tokens
    ("ids")."""
    vocabulary = part.get("vocab")
    ids = [
        *(vocabulary.values() if isinstance(vocabulary, dict) else ()),
        *(part["ids"] if isinstance(part.get("ids"), list) else ()),
        part.get("id"),
        part.get("unk_id"),
        *(
            pair[1]
            for pair in (part.get("sep"), part.get("cls"))
            if isinstance(pair, list) and len(pair) == 2
        ),
    ]
    for number in ids:
        if isinstance(number, int) and not 0 <= number < LARGEST_ID:
            raise RuntimeError(f"it gives a token the id {shown(number)}; ids lie in [0, {LARGEST_ID:,})")


def _check_charsmap(value: Any) -> None:
    """Checks SentencePiece's character table: the size of a trie in 4 bytes, the trie, and texts."""
    if value is None:
        return
    try:
        table = base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError):
        table = b""
    size = int.from_bytes(table[:4], "little")
    if len(table) < 8 or size % 4 or not 4 <= size <= len(table) - 4:
        raise RuntimeError("its precompiled_charsmap is damaged")


def _check_template(part: Mapping[str, Any]) -> None:
    """Checks that the template's `single` contains the text, framed by tokens that the template describes."""
    single, described = part.get("single"), part.get("special_tokens")
    if not isinstance(single, list) or not isinstance(described, dict):
        raise RuntimeError("its TemplateProcessing is damaged")
    sequences = [
        piece["Sequence"].get("id")
        for piece in single
        if isinstance(piece, dict) and isinstance(piece.get("Sequence"), dict)
    ]
    if sequences != ["A"]:
        raise RuntimeError(f"its TemplateProcessing frames the texts {shown(sequences)}, not ['A']")
    for template in (single, part.get("pair") or []):
        for piece in template if isinstance(template, list) else ():
            special = piece.get("SpecialToken") if isinstance(piece, dict) else None
            name = special.get("id") if isinstance(special, dict) else None
            if special is not None and (not isinstance(name, str) or name not in described):
                raise RuntimeError(
                    f"its TemplateProcessing names {shown(name)}, which its special_tokens do not describe"
                )


def _check_strip(part: Mapping[str, Any]) -> None:
    for name in ("start", "stop"):
        number = part.get(name, 0)
        if isinstance(number, int) and not 0 <= number <= LARGEST_STRIP:
            raise RuntimeError(f"its Strip has a {name} of {shown(number)}; it lies in [0, {LARGEST_STRIP}]")
