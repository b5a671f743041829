"""A cache of prompt prefixes: segments of models' caches, kept for other rows.

Each model has a tree of blocks of tokens, in which the path from the root to a node is the beginning of some
prompt. So a segment is found by all the tokens up to its end, on which the keys and values in it depend.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from math import prod
from typing import Any

import jax

Block = tuple[int, ...]
"""The tokens of a segment."""


def blocks_of(tokens: Sequence[int], size: int) -> list[Block]:
    """The whole blocks of a prompt. Its last token is in none: a cache does not cover it."""
    return [tuple(tokens[start : start + size]) for start in range(0, len(tokens) - size, size)]


def shared_lengths(prompts: Sequence[list[int]], others: Sequence[list[int]] = ()) -> list[int]:
    """The length of the prefix that each prompt shares with another one of them, or with one of the
    `others`."""
    every = [*prompts, *others]
    lengths = [0] * len(every)
    # In this order, what shares the longest beginning with a prompt stands next to it.
    for a, b in pairwise(sorted(range(len(every)), key=lambda n: every[n])):
        pairs = zip(every[a], every[b], strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        lengths[a], lengths[b] = max(lengths[a], same), max(lengths[b], same)
    return lengths[: len(prompts)]


def bytes_of(segment: Any) -> int:
    """The bytes of a segment per device."""
    return sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(segment))


class Owner:
    """The owner of a segment: a model with these parameters, and the shape and place of the segment. It holds
    a reference to the parameters, so that no others can be mistaken for them."""

    def __init__(self, model: Any, params: Any, shapes: Any):
        self.params = params
        arrays = [(x.shape, str(x.dtype), x.sharding) for x in jax.tree.leaves(shapes)]
        self.identity = model, *map(id, jax.tree.leaves(params)), *arrays

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owner) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


class Node:
    """A block of tokens after those of its parent."""

    def __init__(self, owner: Owner, parent: "Node | None" = None, block: Block = (), segment: Any = None):
        self.owner, self.parent, self.block, self.segment = owner, parent, block, segment
        self.children: dict[Block, Node] = {}
        self.bytes = bytes_of(segment)


class PrefixCache:
    """Segments by the tokens up to their ends, at most `limit` bytes of them on each device. Those that were
    not used for longest make room for others, the end of a prompt before its beginning."""

    def __init__(self, limit: int):
        self.limit, self.bytes, self.evictions = limit, 0, 0
        self.repeated = 0  # tokens of files that were read again although they could have been kept
        self.roots: dict[Owner, Node] = {}
        # The least recently used first. A node stands before its parent, so the first one has no children.
        self.order: OrderedDict[Node, None] = OrderedDict()

    def find(self, owner: Owner, blocks: Iterable[Block]) -> list[Any]:
        """The segments of the blocks that a prompt begins with, as many as there are."""
        path = self._path(owner, blocks)
        self._use(path)
        return [node.segment for node in path]

    def add(self, owner: Owner, blocks: Sequence[Block], segment: Any) -> None:
        """Keeps the segment of the last of these blocks, where those before it are here and leave room."""
        path = self._path(owner, blocks)
        if len(path) != len(blocks) - 1 or bytes_of(segment) > self.limit:
            return
        root = self.roots.get(owner) or Node(owner)
        parent = path[-1] if path else root
        node = Node(owner, parent, blocks[-1], segment)
        self._use(path)
        while self.bytes + node.bytes > self.limit:
            oldest = next(iter(self.order))
            if oldest is parent:
                return
            self._evict(oldest)
        self.roots[owner] = root
        parent.children[node.block] = node
        self.bytes += node.bytes
        self._use([*path, node])

    def clear(self) -> None:
        """Forgets everything."""
        self.roots.clear()
        self.order.clear()
        self.bytes = 0

    def _path(self, owner: Owner, blocks: Iterable[Block]) -> list[Node]:
        path, node = [], self.roots.get(owner)
        for block in blocks:
            node = None if node is None else node.children.get(block)
            if node is None:
                break
            path.append(node)
        return path

    def _use(self, path: Sequence[Node]) -> None:
        """Moves the nodes of a path to the end of the order."""
        for node in reversed(path):
            self.order[node] = None
            self.order.move_to_end(node)

    def _evict(self, node: Node) -> None:
        del self.order[node]
        if node.parent is not None:
            del node.parent.children[node.block]
        self.bytes -= node.bytes
        self.evictions += 1
        if not self.roots[node.owner].children:  # then its parameters need not be kept either
            del self.roots[node.owner]
