"""Divergences between the distribution of drafts and the distribution that they are verified against.

DIVERGENCES declares each divergence once. Training's flags, help and checks, and the tests, derive from it.

A divergence takes log probabilities [..., V] of both, the target's first, and returns nats [...]. It is 0 if
they are equal. Tokens without mass may be -inf in either argument.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from speccascade_jax.core.methods import Method
from speccascade_jax.core.rules import Scores

Array = jax.Array
BLEND = 3.0
"""How quickly lk_hybrid moves away from KL as drafts are accepted (eta of arXiv 2602.23881, section 4.2)."""


def kl(target: Float[Array, "*B V"], draft: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """sum_v pi(v) log(pi(v) / q(v)); infinite if q lacks a token of pi."""
    possible = target > -jnp.inf
    return jnp.sum(jnp.where(possible, jnp.exp(target) * (target - draft), 0.0), axis=-1)


def total_variation(target: Float[Array, "*B V"], draft: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Half the L1 distance: the probability that a drafted token is rejected."""
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(target) - jnp.exp(draft)), axis=-1)


def lk(target: Float[Array, "*B V"], draft: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """-log sum_v min(pi(v), q(v)), the log likelihood that a drafted token is accepted (arXiv 2602.23881).

    The sum is computed in logarithms, so that it has a value and a gradient however small the overlap is. Its
    gradient is that of the total variation divided by the overlap. For a one-hot target without overlap it
    becomes the cross-entropy.
    """
    return -jax.nn.logsumexp(jnp.minimum(target, draft), axis=-1)


def lk_hybrid(
    target: Float[Array, "*B V"], draft: Float[Array, "*B V"], mask: Bool[Array, "*B"]
) -> Float[Array, "*B"]:
    """w KL + (1 - w) TV with w = exp(-BLEND a), where a is the mean of sum_v min(pi, q) over the batch's real
    tokens, without a gradient (LK^lambda of arXiv 2602.23881)."""
    rejected = total_variation(target, draft)
    mean = jnp.sum(jnp.where(mask, rejected, 0.0)) / jnp.maximum(jnp.sum(mask), 1)
    weight = jax.lax.stop_gradient(jnp.exp(-BLEND * (1.0 - mean)))
    return weight * kl(target, draft) + (1.0 - weight) * rejected


def kl_to_lk(
    target: Float[Array, "*B V"], draft: Float[Array, "*B V"], progress: float | Float[Array, ""]
) -> Float[Array, "*B"]:
    """(1 - t) KL + t LK with t = `progress`, which rises from 0 at the first step to 1 at the last."""
    return (1.0 - progress) * kl(target, draft) + progress * lk(target, draft)


class Divergence(NamedTuple):
    """A function of (target, draft) and of the keyword arguments that it `needs`.

    mask: bool [...], the real tokens of the batch. progress: float [], the fraction of the steps done.
    """

    of: Callable[..., Array]
    summary: str  # a phrase for help texts
    needs: tuple[str, ...] = ()


DIVERGENCES: dict[str, Divergence] = {
    "kl": Divergence(kl, "KL divergence"),
    "tv": Divergence(total_variation, "total variation, the probability that a drafted token is rejected"),
    "lk": Divergence(lk, "-log of the probability that a drafted token is accepted"),
    "lk_hybrid": Divergence(
        lk_hybrid, "mostly KL while few drafts are accepted, mostly total variation once many are", ("mask",)
    ),
    "kl_to_lk": Divergence(kl_to_lk, "from KL at the first step to lk at the last", ("progress",)),
}


def target_law(
    verifier: Float[Array, "*B V"], drafter: Float[Array, "*B V"], method: Method, alpha: float
) -> Float[Array, "*B V"]:
    """log pi of a rule at temperature 1, from both models' log probabilities, without a gradient."""
    verifier, drafter = jax.lax.stop_gradient((verifier, drafter))
    if method.lossless:
        return verifier
    q, p = jnp.exp(drafter), jnp.exp(verifier)
    return jnp.log(method.target(Scores(q, p, q, p, jnp.array(False)), alpha)[0])
