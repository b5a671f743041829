"""Key-value caches: explicit pytrees with a length per row. A rollback lowers the length.

Buffers are [B, H, L, K], but those of a single row are [H, L, K]. If a written buffer has an axis of size
one, XLA's CPU backend makes a second buffer for the attention and copies both in every step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from speccascade_jax.core.nests import insert_rows
from speccascade_jax.core.protocols import AnyArray
from speccascade_jax.models.stacking import Stacked, nth, repeated

Array = jax.Array
TILE = 16  # bfloat16 entries in a TPU tile
IN_TURN = 2
"""Up to this many tokens of a call are written one by one to the caches of stacked layers. XLA for TPUs uses
different cache layouts for writes of single tokens and of several tokens. A drafter that catches up reads two
tokens and then one at a time, which would change the layout of its caches twice in every round."""


Buffers = tuple[Array, ...] | Array
"""The buffer of each layer; stacked layers have one buffer with a leading axis of layers."""


class T5Cache(NamedTuple):
    """The cache of a T5 decoder. Entries at or past `length` are scratch."""

    keys: Buffers  # a layer: [B, H, L, K]
    values: Buffers  # a layer: [B, H, L, K]
    cross_keys: Buffers  # a layer: [B, H, S, K], written once by prefill
    cross_values: Buffers  # a layer: [B, H, S, K]
    source_length: Array  # [B]: later positions of the cross-attention's buffers are masked
    position_bias: tuple[Array, ...]  # [L, H], the bias of a key by distance: one, or one per layer
    length: Array  # [B]


class DecoderCache(NamedTuple):
    """The cache of a decoder-only model. Entries at or past `length` are scratch."""

    keys: Buffers  # a layer: [B, H_kv, L, K], rotated to their positions
    values: Buffers  # a layer: [B, H_kv, L, K]
    length: Array  # [B]


class LocalCache(NamedTuple):
    """The cache of a decoder-only model whose local layers have heads of another size. Entries at or past
    `length` are scratch; layers that read another one's keys and values have none."""

    global_keys: Buffers  # a layer: [B, H_kv, L, K], rotated to their positions
    global_values: Buffers
    local_keys: Buffers
    local_values: Buffers
    length: Array  # [B]


def empty(rows: int, heads: int, size: int, width: int, dtype: Any) -> Array:
    """A buffer to write() into."""
    return jnp.zeros((heads, size, width) if rows == 1 else (rows, heads, size, width), dtype)


def blank(
    layers: Any, rows: int, heads: int, size: int, width: int, dtype: Any, count: int | None = None
) -> Buffers:
    """empty() for each of a network's layers, or for `count` of them. The buffer of stacked layers has a
    multiple of TILE entries. Otherwise accelerators would store the axes in a different order from the one in
    which they compute, and copy the whole buffer."""
    size = -(-size // TILE) * TILE if isinstance(layers, Stacked) else size
    return repeated(empty(rows, heads, size, width, dtype), layers, count)


def entries(buffers: Buffers) -> int:
    """L of buffers [..., L, K]."""
    return jax.tree.leaves(buffers)[0].shape[-2]


def lengthened(cache: Any, more: int) -> Any:
    """The cache with room for `more` tokens, except in cross-attention."""

    def padded(x: Array) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, more), (0, 0)])

    return cache._replace(
        **{
            name: jax.tree.map(padded, buffers)
            for name, buffers in cache._asdict().items()
            if name.endswith(("keys", "values")) and not name.startswith("cross")
        }
    )


def insert_buffer(old: Array, new: Array, slots: AnyArray, like_fresh: bool) -> Array:
    """core.nests.insert for one buffer: old [B, H, L, K], new [R, H, L', K]. A buffer of a single row lacks
    the first axis."""
    rows, fresh = (x.reshape(-1, *x.shape[-3:]) for x in (old, new))
    placed = insert_rows(rows, fresh, slots, like_fresh)
    return placed.reshape(old.shape[:-3] + placed.shape[-3:])


def insert_layers(old: Buffers, new: Buffers, slots: AnyArray, like_fresh: bool) -> Buffers:
    """insert_buffer() for the buffer of every layer."""
    if isinstance(old, tuple):
        return tuple(insert_buffer(a, b, slots, like_fresh) for a, b in zip(old, new, strict=True))
    return jax.vmap(lambda a, b: insert_buffer(a, b, slots, like_fresh))(old, new)


def insert(cache: Any, fresh: Any, slots: AnyArray, like_fresh: bool) -> Any:
    """core.nests.insert for a T5Cache, a DecoderCache or a LocalCache."""
    old, new = cache._asdict(), fresh._asdict()
    buffers = {
        name: insert_layers(old[name], new[name], slots, like_fresh)
        for name in old
        if name.endswith(("keys", "values"))
    }
    lengths = {
        name: insert_rows(old[name], new[name], slots, like_fresh) for name in old if name.endswith("length")
    }
    return (fresh if like_fresh else cache)._replace(**buffers, **lengths)


def each_buffer(function: Callable[..., Array], *buffers: Buffers) -> Buffers:
    """function(a layer's buffer of each of `buffers`) for every layer."""
    if isinstance(buffers[0], tuple):
        return tuple(function(*layer) for layer in zip(*buffers, strict=True))
    return jax.vmap(function)(*buffers)


def positions_of(cache: Any) -> dict[str, Buffers]:
    """The buffers of a DecoderCache or LocalCache with an entry for each position."""
    return {name: held for name, held in cache._asdict().items() if name.endswith(("keys", "values"))}


def cut(buffer: Array, row: AnyArray, start: AnyArray, size: int) -> Array:
    """Entries start .. start+size-1 of a row of [B, H, L, K], or of a single row's [H, L, K]:
    [H, size, K]."""
    rows = buffer.reshape(-1, *buffer.shape[-3:])
    _, heads, _, width = rows.shape
    return lax.dynamic_slice(rows, (row, 0, start, 0), (1, heads, size, width))[0]


def put(buffer: Array, new: Array, rows: AnyArray, start: AnyArray) -> Array:
    """Returns `buffer` [B, H, L, K], or a single row's [H, L, K], with `new` [H, N, K] written at `start` in
    the chosen `rows` [B]."""
    held = buffer.reshape(-1, *buffer.shape[-3:])
    at = (0, 0, start, 0)
    old = lax.dynamic_slice(held, at, (len(held), *new.shape))
    chosen = jnp.where(jnp.asarray(rows)[:, None, None, None], new, old)
    return lax.dynamic_update_slice(held, chosen, at).reshape(buffer.shape)


def segment(cache: Any, row: AnyArray, start: AnyArray, size: int) -> dict[str, Buffers]:
    """The contents of a DecoderCache or LocalCache at positions start .. start+size-1 of a row."""
    return {
        name: each_buffer(lambda buffer: cut(buffer, row, start, size), buffers)
        for name, buffers in positions_of(cache).items()
    }


def with_segment(cache: Any, held: Any, rows: AnyArray, start: AnyArray) -> Any:
    """Returns the cache with a segment() written at `start` in the chosen `rows` [B], which then end
    there."""
    buffers = {
        name: each_buffer(lambda buffer, new: put(buffer, new, rows, start), buffers, held[name])
        for name, buffers in positions_of(cache).items()
    }
    end = start + jax.tree.leaves(held)[0].shape[-2]
    return cache._replace(**buffers, length=jnp.where(rows, end, cache.length))


def write(buffer: Array, new: Array, start: Array, axis: int = 1) -> Array:
    """Returns `buffer` [B, ..., L, ...] with row b's entries start[b] .. start[b]+T-1 along `axis` set to
    `new` [B, ..., T, ...]. A single row's buffer may lack the first axis.

    dynamic_update_slice would clamp a write past the end, so callers keep a block of slack there. (For
    several rows it becomes an in-place scatter; a scatter over transposed axes would copy the buffer.)
    """
    new = new.astype(buffer.dtype)
    if buffer.ndim < new.ndim:
        return lax.dynamic_update_slice_in_dim(buffer, new[0], start[0], axis - 1)
    return jax.vmap(lambda b, n, s: lax.dynamic_update_slice_in_dim(b, n, s, axis - 1))(buffer, new, start)


def write_layer(buffers: Buffers, number: Any, new: Array, start: Array) -> Buffers:
    """All layers' buffers, after write() of `new` [B, H, T, K] to that of layer `number` [B, H, L, K]."""
    if isinstance(buffers, tuple):
        return (*buffers[:number], write(buffers[number], new, start, axis=2), *buffers[number + 1 :])
    new = new.astype(buffers.dtype)
    if buffers.ndim == new.ndim:  # of a single row
        return lax.dynamic_update_slice(buffers, new, (number, 0, start[0], 0))
    if new.shape[2] == IN_TURN:
        for n in range(IN_TURN):
            buffers = write_layer(buffers, number, new[:, :, n : n + 1], start + n)
        return buffers
    row = jnp.arange(len(new))
    at = jnp.stack([jnp.full_like(row, number), row, start], axis=1)
    windows = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(0, 1, 3)
    )
    return lax.scatter(
        buffers,
        at,
        new,
        windows,
        indices_are_sorted=True,
        unique_indices=True,
        mode=lax.GatherScatterMode.CLIP,
    )


def with_more(cache: Any, new: tuple[Buffers, Buffers], count: int) -> Any:
    """A T5Cache or DecoderCache with the keys and values of `count` more tokens, [B, H, T, K] per layer. All
    layers are written at once, because on TPUs a loop that only writes uses a different layout from one that
    also reads, and the caches would change layout in every round."""
    keys, values = (
        write_layers(*pair, cache.length) for pair in zip((cache.keys, cache.values), new, strict=True)
    )
    return cache._replace(keys=keys, values=values, length=cache.length + count)


def write_layers(buffers: Buffers, new: Buffers, start: Array) -> Buffers:
    """All layers' buffers, after write() of `new`, [B, H, T, K] per layer."""
    if isinstance(buffers, tuple) or isinstance(new, tuple):
        return tuple(write(old, x, start, axis=2) for old, x in zip(buffers, new, strict=True))
    if buffers.ndim < new.ndim:  # of a single row
        return lax.dynamic_update_slice(buffers, new[:, 0].astype(buffers.dtype), (0, 0, start[0], 0))
    return jax.vmap(lambda old, x: write(old, x, start, axis=2))(buffers, new)


def remembering(buffers: list[Buffers], number: Any, start: Array) -> Callable[..., tuple[Array, ...]]:
    """A function for layer `number` that writes new keys and values [B, H, T, K] into the layer's entry of
    `buffers` at `start` [B] and returns the layer's buffers. It changes the list in place."""

    def remember(*new: Array) -> tuple[Array, ...]:
        buffers[:] = (
            write_layer(old, number, values, start) for old, values in zip(buffers, new, strict=True)
        )
        return tuple(nth(buffer, number) for buffer in buffers)

    return remember
