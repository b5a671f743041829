"""Logits -> probabilities -> tokens. Everything here is float32."""

from enum import IntEnum

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int, Key

from speccascade_jax.typing import SamplingOptions

Array = jax.Array


class Role(IntEnum):
    """What a random number is for; no two uses share a key."""

    DRAW = 0
    ACCEPT = 1


def position_keys(keys: Key[Array, "B"], role: Role, level: int, position: Int[Array, "B"]
                  ) -> Key[Array, "B"]:
    """One key a row for (role, level, position); `level` counts the samplers below.

    Keyed by position alone, a row's draws depend neither on its batch nor on the number of rounds.
    Drawing a position again after a rollback reuses its key. That is exact: what was rolled back
    touched nothing that stays, so given the kept tokens the key is still fresh.
    """
    def fold(key, position):
        return jax.random.fold_in(jax.random.fold_in(key, len(Role) * level + role), position)

    return jax.vmap(fold)(keys, position)


def uniforms(keys: Key[Array, "B"]) -> Float[Array, "B"]:
    """One float32 in [0, 1) a row; exactly 0 happens."""
    return jax.vmap(jax.random.uniform)(keys)


def draw(keys: Key[Array, "B"], weights: Float[Array, "B V"]) -> Int[Array, "B"]:
    """A token a row with probability proportional to `weights` (>= 0, a positive sum).

    Inverts the cumulative sum; a token of weight zero is never returned, whatever the uniform.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    total = cumulative[:, -1:]
    # u * total can round up to total, which would select past the last positive weight.
    threshold = jnp.minimum(uniforms(keys)[:, None] * total, jnp.nextafter(total, 0.0))
    return jnp.argmax(cumulative > threshold, axis=-1).astype(jnp.int32)


def token_probs(logits: Float[Array, "*B V"], options: SamplingOptions) -> Float[Array, "*B V"]:
    """softmax(logits / temperature), then top-k, then top-p, renormalised (SPEC section 3).

    temperature 0 is the one-hot argmax (the first index on ties). top-k keeps exactly k tokens and
    top-p the smallest set whose mass reaches top_p, the token that crosses it included; among
    equals the lower id comes first.

    >>> token_probs(jnp.log(jnp.array([.5, .25, .15, .1])), SamplingOptions(1.0, top_p=0.7))
    [0.667, 0.333, 0, 0]
    """
    logits = logits.astype(jnp.float32)
    greedy = jnp.asarray(options.temperature) <= 0
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    logits = logits / jnp.where(greedy, 1.0, options.temperature)
    if options.top_k is not None and options.top_k < logits.shape[-1]:
        kept = lax.top_k(logits, options.top_k)[1]
        mask = jnp.put_along_axis(jnp.zeros(logits.shape, bool), kept, True, axis=-1, inplace=False)
        logits = jnp.where(mask, logits, -jnp.inf)
    probs = jax.nn.softmax(logits, axis=-1)
    if options.top_p is not None:
        order = jnp.argsort(-probs, axis=-1, stable=True)
        descending = jnp.take_along_axis(probs, order, axis=-1)
        before = jnp.cumsum(descending, axis=-1) - descending
        inside = (before < options.top_p) | (jnp.asarray(options.top_p) >= 1)
        mask = jnp.put_along_axis(jnp.zeros(probs.shape, bool), order, inside, axis=-1, inplace=False)
        probs = jnp.where(mask, probs, 0.0)
        probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
    return jnp.where(greedy, best, probs)
