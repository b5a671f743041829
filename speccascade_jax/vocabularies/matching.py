"""What two vocabularies share, and how the tokens of each are spelled in the other.

Tokens are matched by the text they stand for (" station", the byte 0xC3), the special ones by their role.
What is committed in target tokens is never tokenised anew, and the target's law is never cut.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from speccascade_jax.tokenizers.tokenizer import Surface, Tokenizer, by_text

LONGEST = 16  # own tokens of a target token: of a longer one the last so many are read


def matched(target: Sequence[Surface], own: Sequence[Surface]) -> Int[np.ndarray, "I 2"]:
    """The tokens that both vocabularies have: (own id, target id), ascending in the own ids, each id once.

    Tokens match where they stand for the same text, those of one kind first, those that are no text by their
    role. Of several that stand for the same text the lowest ids match.
    """
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    for key in (lambda one: one, lambda one: one.text or one):  # of one kind, then of any
        free: dict[Any, list[int]] = {}
        for token in range(len(own) - 1, -1, -1):
            if token not in pairs:
                free.setdefault(key(own[token]), []).append(token)
        for token, surface in enumerate(target):
            if token not in taken and free.get(key(surface)):
                pairs[free[key(surface)].pop()] = token
                taken.add(token)
    return np.array(sorted(pairs.items()), np.int32).reshape(-1, 2)


def spelled(text: bytes, ids: dict[bytes, int]) -> list[int] | None:
    """`text` in the fewest own tokens, whose texts `ids` numbers; None where it cannot be written."""
    longest = max(map(len, ids), default=0)
    best: list[list[int] | None] = [[]]
    for end in range(1, len(text) + 1):
        found = [
            [*before, ids[text[begin:end]]]
            for begin in range(max(end - longest, 0), end)
            if (before := best[begin]) is not None and text[begin:end] in ids
        ]
        best.append(min(found, key=lambda tokens: (len(tokens), tokens), default=None))
    return best[-1]


def spellings(
    target: Sequence[Surface], own: Sequence[Surface], tokenizer: Tokenizer, pairs: Int[np.ndarray, "I 2"]
) -> list[list[int]]:
    """Each target token in own tokens: the same one where there is one, what the tokenizer makes of its text
    where that is this text, else the fewest that spell it; padding where nothing does."""
    same = {int(there): [int(here)] for here, there in pairs}
    ids, words = by_text(own), [n for n, one in enumerate(target) if n not in same and one.text[:1] == b" "]
    texts = [target[n].text.decode(errors="replace") for n in words]
    natural = dict(zip(words, tokenizer.encode_batch(texts), strict=True)) if words else {}
    found = []
    for token, surface in enumerate(target):
        tokens = same.get(token) or natural.get(token) or []
        if token not in same and b"".join(own[n].text for n in tokens) != surface.text:
            tokens = spelled(surface.text, ids) or []
        found.append(tokens[-LONGEST:] or [tokenizer.pad_id])
    return found


def cut_as(target: Tokenizer, own: Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to own tokens, cut as `target` cuts them: each of its tokens is spelled by
    itself, as `translated` has a drafter read what is committed."""
    theirs, ours = target.surfaces(), own.surfaces()
    table = spellings(theirs, ours, own, matched(theirs, ours))
    return lambda texts: [
        [token for one in row for token in table[one]] for row in target.encode_batch(texts)
    ]
