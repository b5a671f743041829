"""Random numbers: one table a decoding, and how tokens are drawn by them."""

from enum import IntEnum

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Key

from speccascade_jax.core.transforms import first

Array = jax.Array


class Role(IntEnum):
    """What a uniform number is for; no two uses share one."""

    DRAW = 0
    ACCEPT = 1


def noise(keys: Key[Array, " B"], levels: int, length: int) -> Float[Array, "B levels 2 L"]:
    """All the randomness of a decoding: a uniform in [0, 1) for each (row, level, Role, position).

    `levels` counts the samplers, from the innermost drafter up. Keyed by position alone, a row's draws depend
    neither on its batch nor on the number of rounds. A position drawn again after a rollback meets the same
    number. That is exact: what was rolled back touched nothing that stays, so given the kept tokens the
    number is still fresh. Made once, before the loop: hashing single keys inside it costs more than
    everything else that a round does outside the models.
    """

    def uniform(key, role, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, role), position))

    roles, positions = jnp.arange(levels * len(Role)), jnp.arange(length)
    by_position = jax.vmap(uniform, (None, None, 0))
    by_role = jax.vmap(by_position, (None, 0, None))
    table = jax.vmap(by_role, (0, None, None))(keys, roles, positions)
    return table.reshape(-1, levels, len(Role), length)


def draw(u: Float[Array, " B"], weights: Float[Array, "B V"]) -> Int[Array, " B"]:
    """A token a row with probability proportional to `weights` (>= 0, a positive sum).

    `u` is uniform in [0, 1); exactly 0 happens. Inverts the cumulative sum. A token of weight zero
    is never returned: not for u = 0, not where u * total rounds up to the total, not where the
    parallel sum is not monotone in its last bits.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    total = jnp.max(jnp.where(weights > 0, cumulative, 0.0), axis=-1, keepdims=True)
    threshold = jnp.minimum(u[:, None] * total, jnp.nextafter(total, 0.0))
    return first((cumulative > threshold) & (weights > 0))
