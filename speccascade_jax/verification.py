"""Draft + target distribution -> how many tokens are accepted, and the one that follows them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Key

from speccascade_jax.sampling import Role, draw, position_keys, uniforms

Array = jax.Array


class Draft(NamedTuple):
    tokens: Int[Array, "B G"]
    probs: Float[Array, "B G+1 V"]  # q~: what each token was drawn from; the last at the bonus position


class Verdict(NamedTuple):
    num_accepted: Int[Array, "B"]  # 0 .. G
    next_token: Int[Array, "B"]    # a correction if num_accepted < G, else the bonus


def accepted_prefix(u: Float[Array, "B G"], draft: Draft, pi: Float[Array, "B G+1 V"]) -> Int[Array, "B"]:
    """The number of leading j with u_j q~_j(x_j) < pi_j(x_j).

    Strict, so that u = 0 never accepts what pi gives no mass; a product, so that nothing divides.
    """
    def drafted(probs):
        return jnp.take_along_axis(probs[:, :-1], draft.tokens[..., None], axis=-1)[..., 0]

    accepted = u * drafted(draft.probs) < drafted(pi)
    return jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1)


def residual(pi: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """max(0, pi - q), unnormalised; pi where rounding leaves it no mass."""
    weights = jnp.maximum(pi - q, 0.0)
    return jnp.where(jnp.sum(weights, axis=-1, keepdims=True) > 0, weights, pi)


def verify(keys: Key[Array, "B"], level: int, start: Int[Array, "B"], draft: Draft,
           pi: Float[Array, "B G+1 V"]) -> Verdict:
    """Steps 4 and 5 of GenSpecSample (Narasimhan et al., Algorithm 4): the output follows pi.

    `start` is the position of draft.tokens[:, 0]. The bonus position is a rejection of nothing:
    with q~ taken as zero there its residual is pi itself.
    """
    size = draft.tokens.shape[1]
    u = jnp.stack([uniforms(position_keys(keys, Role.ACCEPT, level, start + j)) for j in range(size)], axis=1)
    num_accepted = accepted_prefix(u, draft, pi)

    def stopped(probs):
        return jnp.take_along_axis(probs, num_accepted[:, None, None], axis=1)[:, 0]

    bonus = (num_accepted == size)[:, None]
    weights = residual(stopped(pi), jnp.where(bonus, 0.0, stopped(draft.probs)))
    next_token = draw(position_keys(keys, Role.DRAW, level, start + num_accepted), weights)
    return Verdict(num_accepted, next_token)
