"""The tokens that two vocabularies share, and the spelling of each one's tokens in the other.

Tokens are matched by the text they stand for (" station", the byte 0xC3), the special ones by their role.
Committed target tokens are never tokenised again, and the target's distribution is never cut.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from speccascade_jax.tokenizers.tokenizer import Surface, Tokenizer, by_text

LONGEST = 16  # drafter tokens of a target token: of a longer one the last so many are read


def matched(target: Sequence[Surface], drafter: Sequence[Surface]) -> Int[np.ndarray, "I 2"]:
    """The tokens that both vocabularies have: (drafter's id, target id), ascending in the drafter's ids,
    each id once.

    Tokens match if they stand for the same text, those of the same kind first; tokens that are not text match
    by their role. If several stand for the same text, those with the lowest ids match.
    """
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    for key in (lambda surface: surface, lambda surface: surface.text or surface):  # of one kind, then of any
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
    """`text` in the fewest drafter tokens, whose texts `ids` numbers; None if it cannot be written."""
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
    """Each target token in drafter tokens: the same token if there is one; else what the tokenizer makes of
    its text, if that decodes to the text; else the fewest tokens that spell it; padding if none do."""
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
    """A function from texts to drafter tokens, cut as `target` cuts them: each of its tokens is spelled by
    itself, as `translated` has a drafter read what is committed."""
    theirs, ours = target.surfaces(), drafter.surfaces()
    table = spellings(theirs, ours, drafter, matched(theirs, ours))
    return lambda texts: [
        [token for target_token in row for token in table[target_token]] for row in target.encode_batch(texts)
    ]
