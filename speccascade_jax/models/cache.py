"""Key-value caches: explicit pytrees with a per-row length; rolling back is lowering the length."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


class T5Cache(NamedTuple):
    """What a T5 decoder remembers. Entries at or past `length` are scratch."""

    keys: tuple[Array, ...]          # a layer: [B, H, L, K]
    values: tuple[Array, ...]        # a layer: [B, H, L, K]
    cross_keys: tuple[Array, ...]    # a layer: [B, H, S, K], written once by prefill
    cross_values: tuple[Array, ...]  # a layer: [B, H, S, K]
    cross_bias: Array                # [B, 1, 1, S]: 0 on source tokens, very negative on padding
    position_bias: Array             # [L, H]: the decoder's bias of a key that many steps back
    length: Array                    # [B]


def write(buffer: Array, new: Array, start: Array, axis: int = 1) -> Array:
    """`buffer` [B, ..., L, ...] with row b's entries start[b] .. start[b]+T-1 along `axis` set to
    `new` [B, ..., T, ...].

    Entries past the end are dropped. (One row takes the cheaper dynamic_update_slice, which would
    clamp instead: callers keep a block of slack at the end, so that no write reaches it.)
    """
    new = new.astype(buffer.dtype)
    if buffer.shape[0] == 1:
        return lax.dynamic_update_slice_in_dim(buffer, new, start[0], axis)
    buffer, new = jnp.moveaxis(buffer, axis, 1), jnp.moveaxis(new, axis, 1)
    rows = jnp.arange(buffer.shape[0])[:, None]
    columns = start[:, None] + jnp.arange(new.shape[1])
    return jnp.moveaxis(buffer.at[rows, columns].set(new, mode="drop", unique_indices=True), 1, axis)
