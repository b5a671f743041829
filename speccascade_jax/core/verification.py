"""Draft + target distribution -> how many tokens are accepted, and the one that follows them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from speccascade_jax.core.randomness import draw

Array = jax.Array


class Draft(NamedTuple):
    tokens: Int[Array, "B G"]
    probs: Float[Array, "B G+1 V"]  # q~: what each token was drawn from; after the last, the bonus position's
    size: Int[Array, " B"]  # 0 .. G: how many there are

    @property
    def inside(self) -> Bool[Array, "B G"]:
        return jnp.arange(self.tokens.shape[1]) < self.size[:, None]


class Verdict(NamedTuple):
    num_accepted: Int[Array, " B"]  # 0 .. size
    next_token: Int[Array, " B"]  # a correction if num_accepted < size, else the bonus


def accepted_prefix(u: Float[Array, "B G"], draft: Draft, pi: Float[Array, "B G+1 V"]) -> Int[Array, " B"]:
    """The number of leading j with u_j q~_j(x_j) < pi_j(x_j).

    Strict, so that u = 0 never accepts what pi gives no mass; a product, so that nothing divides.
    """

    def drafted(probs):
        return jnp.take_along_axis(probs[:, :-1], draft.tokens[..., None], axis=-1)[..., 0]

    accepted = (u * drafted(draft.probs) < drafted(pi)) & draft.inside
    return jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1)


def residual(pi: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """max(0, pi - q), unnormalised; pi where rounding leaves it no mass."""
    weights = jnp.maximum(pi - q, 0.0)
    return jnp.where(jnp.sum(weights, axis=-1, keepdims=True) > 0, weights, pi)


def verify(
    accept_u: Float[Array, "B G"], draw_u: Float[Array, "B G+1"], draft: Draft, pi: Float[Array, "B G+1 V"]
) -> Verdict:
    """Steps 4 and 5 of GenSpecSample (Narasimhan et al., Algorithm 4): the output follows pi.

    accept_u and draw_u are independent uniforms, one for each drafted position and one for each at which a
    token may be drawn. The bonus position is a rejection of nothing: with q~ taken as zero there its
    residual is pi itself.
    """
    num_accepted = accepted_prefix(accept_u, draft, pi)

    def stopped(x):
        index = num_accepted.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.take_along_axis(x, index, axis=1)[:, 0]

    bonus = (num_accepted == draft.size)[:, None]
    weights = residual(stopped(pi), jnp.where(bonus, 0.0, stopped(draft.probs)))
    return Verdict(num_accepted, draw(stopped(draw_u), weights))


def deferred_drafts(delta: Array | None, draft: Draft) -> Int[Array, " B"]:
    """At how many drafted positions the rule defers (a per-token rule: the drafted token)."""
    if delta is None:
        return jnp.zeros_like(draft.size)
    delta = jnp.broadcast_to(delta, (*draft.probs.shape[:2], delta.shape[-1]))[:, :-1]
    if delta.shape[-1] > 1:
        delta = jnp.take_along_axis(delta, draft.tokens[..., None], axis=-1)
    return jnp.sum(delta[..., 0] & draft.inside, axis=1, dtype=jnp.int32)
