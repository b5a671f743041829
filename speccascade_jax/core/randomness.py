"""Random numbers: tables that are made once a decoding, and how tokens are drawn by them."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Key

from speccascade_jax.core.transforms import first

Array = jax.Array


class Role(IntEnum):
    """The use of a uniform number; no two uses share a number."""

    DRAW = 0
    ACCEPT = 1


class Noise(NamedTuple):
    """The uniform numbers of a decoding, or of the part of it that one round's draft takes.

    `levels[k]` belongs to the sampler of level k, the innermost drafter's being 0. Its axes after the row and
    the Role are positions, from `begin` on, where a number belongs to its position; where it belongs to a
    round, they are the round's first position and the offset in it, the outermost round's first.
    """

    levels: tuple[Float[Array, "B 2 P ..."], ...]
    begin: Int[Array, " B"]

    @property
    def length(self) -> int:
        """The number of positions that have numbers."""
        return self.levels[0].shape[2]

    def at(
        self, start: Int[Array, " B"], level: int, role: Role, count: int, by_round: bool
    ) -> Float[Array, "B count"]:
        """The numbers of the `count` positions from `start` on; `by_round`: of a round that begins there.

        Raises ValueError if they belong to the other: a sampler around this one does not say what it
        contains (`noise_sizes`).
        """
        table, place = self.levels[level][:, role], (start - self.begin)[:, None]
        if table.ndim != 2 + by_round:
            raise ValueError(f"the random numbers of level {level} do not belong to its rounds.")
        if by_round:
            return _row(table, place)[:, :count]
        return jnp.take_along_axis(table, place + jnp.arange(count), axis=1, mode="clip")

    def within(self, level: int, start: Int[Array, " B"]) -> "Noise":
        """The numbers for the drafter in a round that this level begins at `start`."""
        if self.levels[level].ndim == 3:
            return self
        place = (start - self.begin)[:, None, None]
        return Noise((*(_row(table, place) for table in self.levels[:level]),), start)


def _row(table: Array, place: Int[Array, "B ..."]) -> Array:
    """The entries of a table [B, ..., P, *rest] at one position a row, given as `place` [B, ..., 1]: [B, ...,
    *rest]."""
    axis = place.ndim - 1
    place = place.reshape(*place.shape, *(1,) * (table.ndim - place.ndim))
    return jnp.squeeze(jnp.take_along_axis(table, place, axis=axis, mode="clip"), axis)


def noise(
    keys: Key[Array, " B"],
    sizes: Sequence[tuple[int, ...]],
    length: int,
    by_round: Bool[Array, " B"] | None = None,
) -> Noise:
    """All the randomness of a decoding: uniforms in [0, 1), independent of each other.

    `sizes` has an entry for each sampler, from the innermost drafter up. () gives a number to each (row,
    Role, position): a position drawn again after a rollback meets the same number, which is exact where what
    was rolled back touched nothing that stays. Verification of a whole draft is not so: what is rolled back
    decides how much stays. There an entry holds the width of each round that encloses the sampler's draws,
    the outermost first, and a number serves one round alone: its key is folded with the position at which
    each of these rounds began, and with the offset. Rows outside `by_round` [B] (None: no row is outside)
    have the numbers of their positions there, too.

    No number depends on a row's batch, on `length` or on the sizes of rounds. They are made once, before
    the loop: hashing single keys inside it costs more than everything else that a round does outside the
    models. A row takes 8 length prod(sizes[k]) bytes for each sampler k.
    """

    def uniforms(key: Array, sizes: tuple[int, ...]) -> Array:
        if not sizes:
            return jax.random.uniform(key)
        return jax.vmap(lambda n: uniforms(jax.random.fold_in(key, n), sizes[1:]))(jnp.arange(sizes[0]))

    def table(level: int, sizes: tuple[int, ...]) -> Array:
        roles = level * len(Role) + jnp.arange(len(Role))
        by_role = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys, roles)
        return jax.vmap(jax.vmap(lambda key: uniforms(key, (length, *sizes))))(by_role)

    def of_positions(level: int, sizes: tuple[int, ...]) -> Array:
        grid = jnp.indices((length, *sizes)).sum(axis=0)
        return jnp.take(table(level, ()), grid, axis=2, mode="clip")

    def of_level(level: int, sizes: tuple[int, ...]) -> Array:
        numbers = table(level, sizes)
        if by_round is None or not sizes:
            return numbers
        chosen = by_round.reshape(-1, *(1,) * (numbers.ndim - 1))
        return jnp.where(chosen, numbers, of_positions(level, sizes))

    levels = tuple(of_level(level, widths) for level, widths in enumerate(sizes))
    return Noise(levels, jnp.zeros(keys.shape, jnp.int32))


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
