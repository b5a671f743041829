"""The prefix cache: segments of the models' caches, kept for other prompts with the same prefix.

Each model has a tree of token blocks, in which the path from the root to a node is the beginning of a prompt.
A segment is looked up by all tokens up to its end, because its keys and values depend on all of them.
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
    """The whole blocks of a prompt without its last token, which a cache does not cover."""
    return [tuple(tokens[start : start + size]) for start in range(0, len(tokens) - size, size)]


def shared_lengths(prompts: Sequence[list[int]], others: Sequence[list[int]] = ()) -> list[int]:
    """The length of the longest prefix that each prompt shares with another prompt or one of `others`."""
    every = [*prompts, *others]
    lengths = [0] * len(every)
    # In sorted order, the prompt that shares the longest prefix is a neighbour.
    for a, b in pairwise(sorted(range(len(every)), key=lambda n: every[n])):
        pairs = zip(every[a], every[b], strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        lengths[a], lengths[b] = max(lengths[a], same), max(lengths[b], same)
    return lengths[: len(prompts)]


def bytes_of(segment: Any) -> int:
    """A segment's bytes per device."""
    return sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(segment))


class Owner:
    """Identifies a model, its parameters, and the shapes and shardings of its segments. It holds a reference
    to the parameters, so that their ids are not reused."""

    def __init__(self, model: Any, params: Any, shapes: Any):
        self.params = params
        arrays = [(x.shape, str(x.dtype), x.sharding) for x in jax.tree.leaves(shapes)]
        self.identity = model, *map(id, jax.tree.leaves(params)), *arrays

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owner) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


class Node:
    """A block of tokens that follows its parent's."""

    def __init__(self, owner: Owner, parent: "Node | None" = None, block: Block = (), segment: Any = None):
        self.owner, self.parent, self.block, self.segment = owner, parent, block, segment
        self.children: dict[Block, Node] = {}
        self.bytes = bytes_of(segment)


class PrefixCache:
    """Segments by the tokens up to their ends, at most `limit` bytes on each device. The least recently used
    are evicted first, the end of a prompt before its beginning."""

    def __init__(self, limit: int):
        self.limit, self.bytes, self.evictions = limit, 0, 0
        self.repeated = 0  # prefix tokens of a file read more than once
        self.roots: dict[Owner, Node] = {}
        # Least recently used first. A node precedes its parent, so the first node has no children.
        self.order: OrderedDict[Node, None] = OrderedDict()

    def find(self, owner: Owner, blocks: Iterable[Block]) -> list[Any]:
        """The cached segments of a prompt's blocks, up to the first block that is missing."""
        path = self._path(owner, blocks)
        self._use(path)
        return [node.segment for node in path]

    def add(self, owner: Owner, blocks: Sequence[Block], segment: Any) -> None:
        """Adds the segment of the last of `blocks` if those before it are cached and the limit leaves
        room."""
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
        """Removes all segments."""
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
        """Marks the nodes of a path as used last."""
        for node in reversed(path):
            self.order[node] = None
            self.order.move_to_end(node)

    def _evict(self, node: Node) -> None:
        del self.order[node]
        if node.parent is not None:
            del node.parent.children[node.block]
        self.bytes -= node.bytes
        self.evictions += 1
        if not self.roots[node.owner].children:  # so that its parameters can be freed
            del self.roots[node.owner]
