"""Key-value caches: explicit pytrees with a per-row length; rolling back is lowering the length."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


class T5Cache(NamedTuple):
    """What a T5 decoder remembers. Entries at or past `length` are scratch."""

    keys: tuple[Array, ...]          # a layer: [B, L, H, K]
    values: tuple[Array, ...]        # a layer: [B, L, H, K]
    cross_keys: tuple[Array, ...]    # a layer: [B, S, H, K], written once by prefill
    cross_values: tuple[Array, ...]  # a layer: [B, S, H, K]
    cross_bias: Array                # [B, 1, 1, S]: 0 on source tokens, very negative on padding
    position_bias: Array             # [L, H]: the decoder's bias of a key that many steps back
    length: Array                    # [B]


def write(buffer: Array, new: Array, start: Array) -> Array:
    """`buffer` [B, L, ...] with row b's entries start[b] .. start[b]+T-1 set to `new` [B, T, ...].

    Entries past the end are dropped. (One row takes the cheaper dynamic_update_slice, which would
    clamp instead: callers keep a block of slack at the end, so that no write reaches it.)
    """
    new = new.astype(buffer.dtype)
    if buffer.shape[0] == 1:
        return lax.dynamic_update_slice(buffer, new, (0, start[0]) + (0,) * (buffer.ndim - 2))
    rows = jnp.arange(buffer.shape[0])[:, None]
    columns = start[:, None] + jnp.arange(new.shape[1])
    return buffer.at[rows, columns].set(new, mode="drop", unique_indices=True)
