"""The tokens that two vocabularies share, and the spelling of each one's tokens in the other.

Tokens match if they have the same text (" station", the byte 0xC3), special tokens if they have the same
role. Committed target tokens are never tokenized again, and the target's distribution is never restricted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from speccascade_jax.tokenizers.tokenizer import Surface, Tokenizer, by_text

LONGEST = 16  # most drafter tokens of a target token; only the last ones of a longer spelling are read


def matched(target: Sequence[Surface], drafter: Sequence[Surface]) -> Int[np.ndarray, "I 2"]:
    """The common tokens as (drafter id, target id) pairs, in ascending order of the drafter's ids. Each id
    occurs once.

    Tokens match if they have the same text, preferably also the same kind; tokens without text match by their
    role. If several have the same text, those with the lowest ids match.
    """
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    for key in (lambda surface: surface, lambda surface: surface.text or surface):  # the same kind, then any
        free: dict[Any, list[int]] = {}
        for token in range(len(drafter) - 1, -1, -1):
            if token not in pairs:
                free.setdefault(key(drafter[token]), []).append(token)
        for token, surface in enumerate(target):
            if token not in taken and free.get(key(surface)):
                pairs[free[key(surface)].pop()] = token
                taken.add(token)
    return np.array(sorted(pairs.items()), np.int32).reshape(-1, 2)


def spelled(text: bytes, ids: dict[bytes, int]) -> list[int] | None:
    """Spells `text` in the fewest tokens of `ids` (text -> id); None if that is impossible."""
    longest = max(map(len, ids), default=0)
    best: list[list[int] | None] = [[]]
    for end in range(1, len(text) + 1):
        cuts = [
            [*before, ids[text[begin:end]]]
            for begin in range(max(end - longest, 0), end)
            if (before := best[begin]) is not None and text[begin:end] in ids
        ]
        best.append(min(cuts, key=lambda tokens: (len(tokens), tokens), default=None))
    return best[-1]


def spellings(
    target: Sequence[Surface], drafter: Sequence[Surface], tokenizer: Tokenizer, pairs: Int[np.ndarray, "I 2"]
) -> list[list[int]]:
    """Each target token in drafter tokens: the matching token if there is one; else the tokenizer's encoding
    of its text, if that decodes to the same text; else the fewest tokens that spell it; else padding."""
    same = {int(there): [int(here)] for here, there in pairs}
    ids = by_text(drafter)
    words = [n for n, surface in enumerate(target) if n not in same and surface.text[:1] == b" "]
    texts = [target[n].text.decode(errors="replace") for n in words]
    natural = dict(zip(words, tokenizer.encode_batch(texts), strict=True)) if words else {}
    table = []
    for token, surface in enumerate(target):
        tokens = same.get(token) or natural.get(token) or []
        if token not in same and b"".join(drafter[n].text for n in tokens) != surface.text:
            tokens = spelled(surface.text, ids) or []
        table.append(tokens[-LONGEST:] or [tokenizer.pad_id])
    return table


def cut_as(target: Tokenizer, drafter: Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to drafter tokens with the target's token boundaries: each target token is
    spelled separately, which is how a Translated drafter reads committed tokens."""
    theirs, ours = target.surfaces(), drafter.surfaces()
    table = spellings(theirs, ours, drafter, matched(theirs, ours))
    return lambda texts: [
        [token for target_token in row for token in table[target_token]] for row in target.encode_batch(texts)
    ]
