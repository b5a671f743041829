"""Logits -> probabilities -> tokens. Everything here is float32."""

from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int, Key

from speccascade_jax.core.typing import SamplingOptions

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
    everything else a round does besides the models.
    """
    def one(key, role, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, role), position))

    roles, positions = jnp.arange(levels * len(Role)), jnp.arange(length)
    by_position = jax.vmap(one, (None, None, 0))
    by_role = jax.vmap(by_position, (None, 0, None))
    table = jax.vmap(by_role, (0, None, None))(keys, roles, positions)
    return table.reshape(-1, levels, len(Role), length)


def first(mask: Bool[Array, "*B V"]) -> Int[Array, "*B"]:
    """The index of the first true entry, V if there is none (ten times argmax's speed on CPUs)."""
    return jnp.min(jnp.where(mask, jnp.arange(mask.shape[-1], dtype=jnp.int32), mask.shape[-1]), axis=-1)


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


def token_probs(logits: Float[Array, "*B V"], options: SamplingOptions, at_once: bool = False
                ) -> Float[Array, "*B V"]:
    """softmax(logits / temperature), then top-k, top-p and min-p, renormalised.

    Temperature 0 is the one-hot argmax (the first index on ties). top-k keeps exactly k tokens, top-p the
    smallest set whose mass reaches top_p, the token that crosses it included (Holtzman et al. 2020), min-p
    the tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024); among equals the lower
    id comes first. An option [B] is its row's. TPUs truncate row by row, on the chip, unless `at_once`.
    """
    if logits.ndim > 2 and not (at_once or options.top_p is options.top_k is options.min_p is None):
        return lax.platform_dependent(default=lambda: token_probs(logits, options, True), tpu=lambda: lax.map(
            lambda row: token_probs(*row), (logits, options.of_rows(len(logits)))))

    def of_row(value: Any) -> Array:
        """What broadcasts against the logits, of [] or [B]."""
        return jnp.reshape(value, jnp.shape(value) + (1,) * (logits.ndim - 1) * jnp.ndim(value))

    def ranked() -> Bool[Array, "*B V"]:
        order = lax.top_k(logits, most)[1]
        inside = jnp.broadcast_to(jnp.arange(most) < k, order.shape)
        return jnp.put_along_axis(jnp.zeros(logits.shape, bool), order, inside, axis=-1, inplace=False)

    logits, temperature = logits.astype(jnp.float32), of_row(options.temperature)
    greedy = temperature <= 0
    best = jax.nn.one_hot(first(logits == jnp.max(logits, axis=-1, keepdims=True)), logits.shape[-1])
    logits = logits / jnp.where(greedy, 1.0, temperature)
    if options.top_k is not None:
        most, k = min(options.max_top_k or logits.shape[-1], logits.shape[-1]), of_row(options.top_k)
        inside = lax.platform_dependent(cpu=ranked, default=lambda: largest(jax.nn.softmax(logits), 1, k))
        logits = jnp.where(inside | (k < 1), logits, -jnp.inf)
    probs = jax.nn.softmax(logits, axis=-1)
    if options.top_p is not None:
        top_p = of_row(options.top_p)
        probs = jnp.where(top_p < 1, renormalized(probs, largest(probs, probs, top_p)), probs)
    if options.min_p is not None:
        min_p = of_row(options.min_p)
        likely = probs >= min_p * jnp.max(probs, axis=-1, keepdims=True)
        probs = jnp.where(min_p > 0, renormalized(probs, likely), probs)
    return jnp.where(greedy, best, probs)


def largest(x: Float[Array, "*B V"], weights: Any, enough: Any) -> Bool[Array, "*B V"]:
    """The fewest of the largest x (>= 0), on ties the first, whose weights sum to `enough`. Equal ones have
    equal weights. Nothing is sorted: the bits of the smallest of them are found one by one."""
    def bit(n: Array, edge: Array) -> Array:
        higher = edge | (jnp.uint32(2**31) >> n)
        found = jnp.sum(jnp.where(bits >= higher, weights, 0), axis=-1, keepdims=True)
        return jnp.where(found >= enough, higher, edge)

    bits = lax.bitcast_convert_type(x, jnp.uint32)
    edge = lax.fori_loop(jnp.uint32(0), jnp.uint32(32), bit, jnp.zeros_like(bits[..., :1]))
    above, equal = bits > edge, bits == edge
    before = jnp.sum(jnp.where(above, weights, 0), axis=-1, keepdims=True)
    return above | (equal & (before + (jnp.cumsum(equal, axis=-1) - 1) * weights < enough))


def renormalized(probs: Float[Array, "*B V"], mask: Bool[Array, "*B V"]) -> Float[Array, "*B V"]:
    """`probs` where `mask`, 0 elsewhere, summing to one."""
    probs = jnp.where(mask, probs, 0.0)
    return probs / jnp.sum(probs, axis=-1, keepdims=True)
