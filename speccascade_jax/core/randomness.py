"""Random numbers: tables made once per decoding, and sampling of tokens with them."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int, Key

from speccascade_jax.core.transforms import first

Array = jax.Array


class Role(IntEnum):
    """The use of a uniform number; no two uses share a number."""

    DRAW = 0
    ACCEPT = 1


class Noise(NamedTuple):
    """The uniform numbers of a decoding, or the part of them that one round's draft uses.

    `levels[k]` belongs to the sampler of level k; level 0 is the innermost drafter. Its axes after row and
    Role are positions from `begin` on, if numbers belong to positions. If they belong to rounds, the axes are
    the first positions of the enclosing rounds, the outermost first, and the offset.
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
        """The numbers of `count` positions from `start` on or, with `by_round`, of a round that begins there.

        Raises ValueError for the wrong kind, which means that a sampler around this one does not declare its
        parts (`noise_sizes`).
        """
        table, place = self.levels[level][:, role], (start - self.begin)[:, None]
        if table.ndim != 2 + by_round:
            raise ValueError(f"the random numbers of level {level} do not belong to its rounds.")
        if by_round:
            return _row(table, place)[:, :count]
        return jnp.take_along_axis(table, place + jnp.arange(count), axis=1, mode="clip")

    def within(self, level: int, start: Int[Array, " B"]) -> "Noise":
        """The drafter's numbers in a round that this level begins at `start`."""
        if self.levels[level].ndim == 3:
            return self
        place = (start - self.begin)[:, None, None]
        return Noise((*(_row(table, place) for table in self.levels[:level]),), start)


def _row(table: Array, place: Int[Array, "B ..."]) -> Array:
    """The entries [B, ..., *rest] of a table [B, ..., P, *rest] at one position per row, `place` [B, ...,
    1]."""
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

    `sizes` has an entry for each sampler, from the innermost drafter up. An entry () gives a number to each
    (row, Role, position). A position that is drawn again after a rollback then uses the same number, which is
    exact if the tokens that were rolled back did not affect those that remain. In block verification they do.
    There, an entry has the width of each round that encloses the sampler's draws, the outermost first, and a
    number belongs to one round: it depends on the positions at which these rounds began and on the offset.
    Rows outside `by_round` [B] (None: all rows are inside) still use the numbers of their positions.

    The numbers do not depend on a row's batch, on `length` or on block sizes. They are made once before the
    loop, because hashing keys inside it costs more than everything else in a round besides the models. A row
    takes 8 length prod(sizes[k]) bytes for each sampler k.
    """

    def folded(key: Array, size: int, of_key: Callable[[Array], Array], axis: int) -> Array:
        return jax.vmap(lambda n: of_key(jax.random.fold_in(key, n)), out_axes=axis)(jnp.arange(size))

    def by_position(key: Array) -> Array:
        return folded(key, length, jax.random.uniform, 0)

    def by_rounds(key: Array, sizes: tuple[int, ...]) -> Array:
        if not sizes:  # the longest axis without a key for each entry: half as many hashes
            with jax.threefry_partitionable(True):  # number n does not depend on the length
                return jax.random.uniform(key, (length,))
        return folded(key, sizes[0], lambda folded_key: by_rounds(folded_key, sizes[1:]), 1)

    def table(level: int, sizes: tuple[int, ...]) -> Array:
        roles = level * len(Role) + jnp.arange(len(Role))
        by_role = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys, roles)
        return jax.vmap(jax.vmap(lambda key: by_rounds(key, sizes) if sizes else by_position(key)))(by_role)

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
    """Draws one token per row with probability proportional to `weights` (>= 0, with a positive sum).

    It inverts the cumulative sum at `u`, uniform in [0, 1). A token of weight zero is never returned, even if
    u = 0, if u * total rounds up to the total, or if the parallel sum is not monotone in its last bits.
    """
    return lax.platform_dependent(
        u, weights, cpu=_by_blocks, default=lambda u, weights: _inverted(u, weights)[0]
    )


def _inverted(
    u: Float[Array, " B"], weights: Float[Array, "B N"], of_total: bool = True
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The first entry with weight at which the cumulative sum exceeds `u`, or `u` times the total, and by how
    much `u` then exceeds the sum of those before it."""
    cumulative = jnp.cumsum(weights, axis=-1)
    total = jnp.max(jnp.where(weights > 0, cumulative, 0.0), axis=-1)
    threshold = jnp.minimum(u * total if of_total else u, jnp.nextafter(total, 0.0))
    index = first((cumulative > threshold[:, None]) & (weights > 0))
    before = jnp.take_along_axis(cumulative, index[:, None] - 1, axis=1, mode="clip")[:, 0]
    return index, threshold - jnp.where(index > 0, before, 0.0)


def _by_blocks(u: Float[Array, " B"], weights: Float[Array, "B V"]) -> Int[Array, " B"]:
    """draw() by a block of about the root of V tokens, then a token in it: XLA's cumulative sum over all
    takes nine times as long on CPUs."""
    size = weights.shape[-1]
    width = 1 << (size.bit_length() + 1) // 2
    blocks = jnp.pad(weights, ((0, 0), (0, -size % width))).reshape(len(weights), -1, width)
    block, rest = _inverted(u, jnp.sum(blocks, axis=-1))
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1, mode="clip")[:, 0]
    return jnp.minimum(block * width + _inverted(rest, inside, False)[0], size)
