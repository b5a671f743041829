"""Markers as tokens: the texts after which a row has another lenience (core.spans).

A text may be written in several tokenizations. A marker is found in those that the tokenizer itself gives it
at the beginning of a text, after a sentence and a space, and on a new line, and as a piece of that name, such
as </think>. In others it is not found. What is found depends on the written tokens alone, so the law stays
one of the prefix. The tokens are those of the verifier's vocabulary, whoever drafts them.
"""

from collections.abc import Mapping, Sequence

from speccascade_jax.core.errors import FieldError
from speccascade_jax.tokenizers.tokenizer import Tokenizer

BEFORE = ("", ""), (".", " "), (".\n", "")  # what is written before a marker, and what joins the two
LONGEST = 16  # tokens of a marker
PLACES = 8  # of a row: for every spelling of its markers
Spelled = tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]
"""Tokens and the leniences after them, as core.spans looks them up: of two that end together, the later
decides."""


def spellings(tokenizer: Tokenizer, marker: str) -> list[tuple[int, ...]]:
    """The tokens of a marker, as often as it has unlike ones. Raises FieldError where the tokenizer does not
    keep the text, or needs too many tokens for it."""
    piece = tokenizer.id_of(marker)
    found: list[tuple[int, ...]] = [] if piece is None else [(piece,)]
    for before, joint in BEFORE:
        [first], [whole] = (tokenizer.encode_batch([text]) for text in (before, before + joint + marker))
        rest = tuple(whole[len(first) :])
        if rest and whole[: len(first)] == first and tokenizer.decode(rest).lstrip(" ") == marker.lstrip(" "):
            found.append(rest)
    if not found:
        raise FieldError(
            "alpha_after",
            marker,
            "give a text that its tokenizer keeps as it is.",
            f"the verifier's vocabulary cannot spell the marker {marker[:40]!r}",
        )
    if (longest := max(map(len, found))) > LONGEST:
        raise FieldError(
            "alpha_after",
            marker,
            f"at most {LONGEST} are looked for: shorten it.",
            f"the marker {marker[:40]!r} has {longest} tokens",
        )
    return list(dict.fromkeys(found))


def spelled(tokenizer: Tokenizer, leniences: Mapping[str, Sequence[float]]) -> Spelled:
    """Every spelling of the markers with the leniences after it, the longer ones later, and of equally long
    ones those of later markers. Raises FieldError for markers that cannot be looked for."""
    every = [
        (tokens, tuple(alphas))
        for marker, alphas in leniences.items()
        for tokens in spellings(tokenizer, marker)
    ]
    if len(every) > PLACES:
        raise FieldError(
            "alpha_after",
            dict(leniences),
            "give fewer markers.",
            f"the markers of alpha_after have {len(every)} spellings, and at most {PLACES} are looked for",
        )
    return tuple(sorted(every, key=lambda entry: len(entry[0])))
