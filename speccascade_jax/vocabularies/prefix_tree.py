"""String-level rejection sampling (Timor et al. 2025, arXiv 2502.05202, Algorithm 3): the texts that a
drafter must be asked to continue to obtain psi, the distribution of the first target token of what it writes.

The drafter writes until no longer target token can match, and the longest match is the first target token. If
its tokens are bytes or characters, there is one text for each inner node of the trie of target tokens. If
they are pieces, there is one for each spelling, soon too many.
"""

from collections.abc import Sequence

import numpy as np

from speccascade_jax.core.errors import FieldError
from speccascade_jax.tokenizers.tokenizer import Surface, by_text
from speccascade_jax.vocabularies.translated import Strings

MOST_TEXTS, MOST_ENTRIES = 8192, 2**22
"""The maximum number of texts, and of (text, next token) pairs."""
TOGETHER = 256  # texts that the drafter reads in one call


def strings(target: Sequence[Surface], drafter: Sequence[Surface], rows: int, size: int) -> Strings:
    """The texts that the drafter may have to continue, as a tree whose node 0 is the empty text.

    rows: the number of target tokens; as an id it means "none". size: the number of the drafter's logits.
    Raises FieldError for too many texts.
    """
    ids, ours = by_text(target), by_text(drafter)
    inner = {text[:n] for text in ids for n in range(len(text))}
    end = next(n for n, surface in enumerate(drafter) if surface.kind == "eos")
    last = next(n for n, surface in enumerate(target) if surface.kind == "eos")

    def match(text: bytes) -> int:
        return next((ids[text[:n]] for n in range(len(text), 0, -1) if text[:n] in ids), rows)

    texts, parent, token, goes = [b""], [0], [0], []
    stack = [0]
    order = []  # depth first
    while stack:
        node = stack.pop()
        order.append(node)
        row = np.full(size, rows, np.int32)
        row[end] = match(texts[node]) if node else last
        for piece, number in ours.items():
            text = texts[node] + piece
            if text not in inner:
                row[number] = match(text)
                continue
            stack.append(len(texts))
            texts.append(text)
            parent.append(node)
            token.append(number)
        goes.append((node, row))
        if len(texts) > MOST_TEXTS or len(texts) * size > MOST_ENTRIES:
            raise FieldError(
                "vocabulary",
                "slrs",
                "it is for drafters of bytes or characters: use tli or slem.",
                f"slrs would ask the drafter after more than {len(goes)} texts for every token",
            )
    table = np.zeros((len(texts), size), np.int32)
    for node, row in goes:
        table[node] = row
    chunks: list[list[int]] = [[]]
    slot = np.zeros(len(texts), np.int32)
    for node in order[1:]:
        path = [node]
        while parent[path[0]]:
            path.insert(0, parent[path[0]])
        missing = [ancestor for ancestor in path if ancestor not in chunks[-1]]
        if len(chunks[-1]) + len(missing) > TOGETHER:
            chunks.append([])
            missing = path
        chunks[-1] += missing
        slot[node] = (len(chunks) - 1) * TOGETHER + len(chunks[-1]) - 1
    shape = len(chunks), TOGETHER
    tokens, depth = np.zeros(shape, np.int32), np.ones(shape, np.int32)
    within = np.full((*shape, TOGETHER), -1, np.int32)
    for number, chunk in enumerate(chunks):
        places = {node: place for place, node in enumerate(chunk)}
        for place, node in enumerate(chunk):
            tokens[number, place], back, before = token[node], 0, node
            while before:
                within[number, place, places[before]] = back
                back, before = back + 1, parent[before]
            depth[number, place] = back
    above, last_token = np.array(parent, np.int32), np.array(token, np.int32)
    return Strings(tokens, depth, within, slot[1:], above, last_token, table)
