"""Tokenizes markers, the texts after which a row has another lenience (core.spans).

A text can have several tokenizations. A marker is recognised in those that the tokenizer produces at the
beginning of a text, after a sentence and a space, and on a new line, and as a piece of that name, such as
</think>. Line breaks may follow: byte-level BPE has one token for a colon and the line breaks after it, which
then completes a marker that ends with a colon. Other tokenizations are not recognised. Recognition depends
only on the written tokens, so the distribution still depends only on the prefix. The tokens are those of the
verifier's vocabulary, whichever model drafts them.
"""

import itertools
from collections.abc import Mapping, Sequence

from speccascade_jax.core.errors import FieldError
from speccascade_jax.tokenizers.tokenizer import Tokenizer

BEFORE = "", ". ", ".\n"  # texts before a marker
AFTER = "", "\n", "\n\n"  # texts after it
LONGEST = 16  # most tokens of a marker
PLACES = 24  # most spellings of a row's markers
Tokenized = tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]
"""Tokens and the leniences after them, in the order of core.spans: if two end at the same token, the later
one counts."""


def tokenizations(tokenizer: Tokenizer, marker: str) -> list[tuple[int, ...]]:
    """The distinct token sequences of a marker. Raises FieldError if the tokenizer changes the text, or needs
    too many tokens for it."""
    piece = tokenizer.id_of(marker)
    forms: list[tuple[int, ...]] = [] if piece is None else [(piece,)]
    for before, after in itertools.product(BEFORE, AFTER):
        tokens = tokenization(tokenizer, before, marker, after)
        forms += [tokens] if tokens else []
    if not forms:
        raise FieldError(
            "alpha_after",
            marker,
            "give a text that its tokenizer keeps as it is.",
            f"the verifier's vocabulary cannot spell the marker {marker[:40]!r}",
        )
    if (longest := max(map(len, forms))) > LONGEST:
        raise FieldError(
            "alpha_after",
            marker,
            f"at most {LONGEST} are looked for: shorten it.",
            f"the marker {marker[:40]!r} has {longest} tokens",
        )
    return list(dict.fromkeys(forms))


def tokenization(tokenizer: Tokenizer, before: str, marker: str, after: str) -> tuple[int, ...]:
    """The tokens of before + marker + after that contain the marker. The first may also contain an end of
    `before`, and the last a beginning of `after`. () if the tokenizer changes the text."""
    [tokens] = tokenizer.encode_batch([before + marker + after])
    text, stripped = (before + marker).lstrip(" "), marker.lstrip(" ")

    def decoded(first: int, end: int) -> str:
        return tokenizer.decode(tokens[first:end]).lstrip(" ")

    end = next((n for n in range(1, len(tokens) + 1) if decoded(0, n).startswith(text)), 0)
    if not (end and stripped):
        return ()
    more = decoded(0, end)[len(text) :]
    first = max(n for n in range(end) if decoded(n, end).removesuffix(more).endswith(stripped))
    return tuple(tokens[first:end])


def tokenized(tokenizer: Tokenizer, leniences: Mapping[str, Sequence[float]]) -> Tokenized:
    """Every spelling of the markers with the leniences after it, in ascending order of length and then of the
    markers. Raises FieldError for markers that cannot be recognised."""
    every = [
        (tokens, tuple(alphas))
        for marker, alphas in leniences.items()
        for tokens in tokenizations(tokenizer, marker)
    ]
    if len(every) > PLACES:
        raise FieldError(
            "alpha_after",
            dict(leniences),
            "give fewer markers.",
            f"the markers of alpha_after have {len(every)} spellings, and at most {PLACES} are looked for",
        )
    return tuple(sorted(every, key=lambda entry: len(entry[0])))
