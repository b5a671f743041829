"""Texts that are searched besides a row's own: what usually followed the last tokens in them (retrieval-based
speculative decoding: REST, He et al. 2023, arXiv 2311.08252).

An index is made once, on the host. In the compiled loop a search looks up one place for each number of last
tokens, however many texts there are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int, Shaped

from speccascade_jax.core.nests import fitted
from speccascade_jax.core.protocols import AnyArray

Array = jax.Array
LONGEST = 3  # most tokens compared; longer matches predicted hardly better, or worse
REACH = 12  # most tokens of a continuation
LEAST_SHARE = 0.1  # a token is drafted if at least this share of a sequence's occurrences lead to it
SLOTS = 4  # slots per indexed sequence; with fewer, more of the rare sequences lose theirs
MOST_TOKENS = 2**23  # of all texts together: 32 MiB, and up to 64 bytes for each different sequence


class Stored(NamedTuple):
    """Tokenized texts, one after another, and a hash table of the sequences of up to LONGEST tokens in them,
    each with its best continuation."""

    tokens: Int[Array, " N"]  # at the end, REACH zeros
    table: Int[Array, "M 2"]  # hash and entry of a sequence; M is a power of two

    # An entry is the place where the continuation begins, times 16, plus the number of its tokens that are
    # worth drafting; 0: none. A search trusts the hash, because verification rejects a wrong draft.


class Match(NamedTuple):
    """The tokens after the longest match."""

    tokens: Int[Array, "B G"]
    size: Int[Array, " B"]  # 0 .. G: how many of them there are
    match: Int[Array, " B"]  # 0 .. LONGEST: how many of the last tokens stood before them


def hashes(last: Shaped[AnyArray, "*B LONGEST"]) -> list[Any]:
    """The hash, as uint32 [*B], of the last token, of the last two tokens, and so on; `last` has the newest
    first."""
    state: Any = np.uint32(0)
    result = list[Any]()
    for n in range(LONGEST):
        state = (state ^ last[..., n].astype("uint32")) * np.uint32(0x9E3779B1) + np.uint32(0x7F4A7C15)
        state ^= state >> np.uint32(15)
        result.append(state)
    return result


def search(stored: Stored, last: Int[Array, "B LONGEST"], count: int) -> Match:
    """The best continuation of the `last` tokens, newest first, or of as many of them as are found in the
    texts."""
    hashed = jnp.stack(hashes(last), axis=-1)
    rows = jnp.take(stored.table, hashed & (len(stored.table) - 1), axis=0, mode="clip")  # [B, LONGEST, 2]
    present = (rows[..., 0] == hashed.astype(jnp.int32)) & (rows[..., 1] > 0)
    # One number for each length, with the length in the higher bits.
    best = jnp.max(jnp.where(present, (jnp.arange(1, LONGEST + 1) << 28) + rows[..., 1], 0), axis=-1)
    place, size = (best & (2**28 - 1)) >> 4, best & 15
    # As a slice, because XLA for CPUs would split a gather from a large array among threads.
    width = min(count, REACH)
    following = jax.vmap(lambda at: lax.dynamic_slice(stored.tokens, (at,), (width,)))(place)
    return Match(fitted(following, (count,)), jnp.minimum(size, count), best >> 28)


def index_of(texts: Sequence[Sequence[int]]) -> Stored:
    """The index of texts of at least one token each. They begin with what precedes an output, and end with
    the end-of-sequence token.

    The best of a sequence's continuations is the one that agrees most with the others: the one with the
    largest sum, over its first REACH tokens, of the number of continuations that agree up to that token.
    """
    tokens = np.concatenate([np.asarray(text, np.int64) for text in texts])
    left = np.concatenate([np.arange(len(text), 0, -1) for text in texts])  # tokens up to the text's end
    kinds, counts = _occurrences(tokens, left, LONGEST + REACH)
    entries = list[Any]()
    for n in range(1, LONGEST + 1):
        places = np.flatnonzero(left > n)
        kind, agreeing = kinds[n - 1, places], counts[n : n + REACH, places]
        order = np.lexsort((places, -agreeing.sum(axis=0), kind))
        best = order[np.unique(kind[order], return_index=True)[1]]
        begin, frequency = places[best] + n, counts[n - 1, places[best]]
        size = np.sum(agreeing[:, best] >= LEAST_SHARE * frequency, axis=0)
        last = tokens[np.maximum(begin[:, None] - 1 - np.arange(LONGEST), 0)]
        entries.append((frequency, hashes(last)[n - 1], begin, size))
    frequency, hashed, begin, size = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    count = 1 << (SLOTS * len(begin)).bit_length()
    order = np.argsort(frequency, kind="stable")  # what is written to a slot last, stays
    table = np.zeros((count, 2), np.int32)
    table[hashed[order] & (count - 1)] = np.stack([hashed.view(np.int32), begin << 4 | size], axis=1)[order]
    padded = np.pad(tokens, (0, REACH))  # so that a slice of the last continuation is not moved
    return Stored(jnp.asarray(padded, jnp.int32), jnp.asarray(table))


def _occurrences(
    tokens: Int[np.ndarray, " N"], left: Int[np.ndarray, " N"], longest: int
) -> tuple[Int[np.ndarray, "L N"], Int[np.ndarray, "L N"]]:
    """For sequences of 1 .. longest tokens, by the place where they begin: a number that is equal for equal
    sequences of one length, and how often the sequence occurs. Both are 0 where the text ends earlier."""
    kinds, counts = (np.zeros((longest, len(tokens)), np.int32) for _ in range(2))
    shorter = np.zeros(len(tokens), np.int64)
    for n in range(longest):
        begins = np.flatnonzero(left > n)
        sequences = shorter[begins] * (tokens.max() + 1) + tokens[begins + n]
        _, numbers, occurrences = np.unique(sequences, return_inverse=True, return_counts=True)
        kinds[n, begins] = shorter[begins] = numbers
        counts[n, begins] = occurrences[numbers]
    return kinds, counts
