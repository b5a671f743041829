"""Verification: from a draft and target distributions to the accepted tokens and the next token.

With both verifications, the output follows pi given its prefix, for every drafter distribution q~. `token`
accepts or rejects each drafted token separately, up to the first rejection. `block` (Sun et al., arXiv
2403.10444) judges the draft as a whole and on average accepts at least as many tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from speccascade_jax.core.protocols import Sampler, ability_of
from speccascade_jax.core.randomness import draw

Array = jax.Array


class Draft(NamedTuple):
    tokens: Int[Array, "B G"]
    probs: Float[Array, "B G+1 V"]  # q~ of each drafted token, then that of the bonus position
    size: Int[Array, " B"]  # 0 .. G, number of drafted tokens

    @property
    def inside(self) -> Bool[Array, "B G"]:
        return jnp.arange(self.tokens.shape[1]) < self.size[:, None]


class Verdict(NamedTuple):
    num_accepted: Int[Array, " B"]  # 0 .. size
    next_token: Int[Array, " B"]  # a correction if num_accepted < size, else the bonus token


def by_token(
    u: Float[Array, "B G"], draft: Draft, pi: Float[Array, "B G+1 V"]
) -> tuple[Int[Array, " B"], Float[Array, "B G+1"]]:
    """The number of leading j with u_j q~_j(x_j) < pi_j(x_j), and weights of 1.

    Strict, so that u = 0 never accepts a token without mass in pi. A product avoids a division by zero.
    """
    accepted = (u * _of_drafted(draft.probs, draft) < _of_drafted(pi, draft)) & draft.inside
    return leading(accepted), jnp.ones(pi.shape[:2])


def leading(mask: Bool[Array, "B G"]) -> Int[Array, " B"]:
    """The number of true entries before the first false one."""
    size = mask.shape[1]
    return jnp.min(jnp.where(mask, size, jnp.arange(size)), axis=1, initial=size)


def by_block(
    u: Float[Array, "B G"], draft: Draft, pi: Float[Array, "B G+1 V"]
) -> tuple[Int[Array, " B"], Float[Array, "B G+1"]]:
    """The largest j with u_j < h_j (0 if there is none), and the weights w_0 .. w_G: see block_chances()."""
    chances, weights = block_chances(draft, pi)
    count = 1 + jnp.arange(u.shape[1])
    return jnp.max(jnp.where((u < chances) & draft.inside, count, 0), axis=1, initial=0), weights


def block_chances(
    draft: Draft, pi: Float[Array, "B N V"]
) -> tuple[Float[Array, "B N-1"], Float[Array, "B N"]]:
    """h_1 .. h_G and w_0 .. w_G (Sun et al., Algorithm 2, with pi for their target). After j tokens of n,

        w_0 = 1    w_j = min(1, w_{j-1} pi_j(x_j) / q~_j(x_j))
        R_j = sum_v max(0, w_j pi_{j+1}(v) - q~_{j+1}(v))    h_j = R_j / (R_j + (1 - w_j)), and w_n for j = n

    Given the first j tokens, at least j are accepted with probability w_j. If exactly j are, the next token
    is drawn from max(0, w_j pi_{j+1} - q~_{j+1}). If w_j = 1 and R_j = 0, any h_j is valid.
    """
    weights = block_weights(draft, pi)
    left = jnp.sum(jnp.maximum(weights[..., None] * pi - draft.probs, 0.0), axis=-1)[:, 1:]
    w = weights[:, 1:]
    total = left + (1.0 - w)  # left itself where w is 1: the chance is then 1 exactly
    at_end = draft.size[:, None] == 1 + jnp.arange(w.shape[1])
    return jnp.where(at_end, w, left / jnp.where(total > 0, total, 1.0)), weights


def block_weights(draft: Draft, pi: Float[Array, "B N V"]) -> Float[Array, "B N"]:
    """w_0 .. w_G of block_chances()."""
    q = _of_drafted(draft.probs, draft)
    ratios = jnp.where(q > 0, _of_drafted(pi, draft) / jnp.where(q > 0, q, 1.0), 0.0)
    weights = [jnp.ones_like(pi[:, 0, 0])]
    for ratio in ratios.T:
        weights.append(jnp.minimum(1.0, weights[-1] * ratio))
    return jnp.stack(weights, axis=1)


def _of_drafted(probs: Float[Array, "B N V"], draft: Draft) -> Float[Array, "B N-1"]:
    return jnp.take_along_axis(probs[:, :-1], draft.tokens[..., None], axis=-1)[..., 0]


def standing_by_token(ratios: Float[np.ndarray, "*B G"]) -> Float[np.ndarray, "*B G+1"]:
    """prod_{i <= j} min(1, r_i) for j = 0 .. G: see Verification.standing."""
    return _from_one(np.minimum(ratios, 1), np.multiply)


def standing_by_block(ratios: Float[np.ndarray, "*B G"]) -> Float[np.ndarray, "*B G+1"]:
    """min_{k <= j} prod_{i <= k} r_i for j = 0 .. G: see Verification.standing.

    It is q~(x_1..x_j) w_j / pi(x_1..x_j), where w_j = min_{k <= j} prod_{k < i <= j} 1 / r_i.
    """
    with np.errstate(divide="ignore"):
        logarithms = np.log(ratios, dtype=np.float64)  # sums of logarithms do not overflow
    return _from_one(np.exp(np.minimum(np.cumsum(logarithms, axis=-1), 0)), np.minimum)


def _from_one(values: Float[np.ndarray, "*B G"], operation: np.ufunc) -> Float[np.ndarray, "*B G+1"]:
    return operation.accumulate(np.insert(np.asarray(values, np.float64), 0, 1.0, axis=-1), axis=-1)


@dataclasses.dataclass(frozen=True)
class Verification:
    """A way to verify a draft."""

    accept: Callable[..., tuple[Array, Array]]
    """(u, draft, pi) -> the number of accepted tokens [B], and pi's weight in the residual after each number
    of accepted tokens [B, G+1]."""
    standing: Callable[[np.ndarray], np.ndarray]
    """The probability, given an output text x, that the first j = 0 .. G drafted tokens of a round are
    accepted and equal x_1 .. x_j, from r_i = q~_i(x_i) / pi_i(x_i). Plans and expected numbers of calls are
    based on it."""
    summary: str  # a phrase for help texts
    by_round: bool = False  # each round needs its own random numbers: see randomness.noise
    default: bool = False
    name: str = ""


TOKEN = Verification(
    by_token,
    standing_by_token,
    "each drafted token individually, up to the first rejection",
    default=True,
    name="token",
)
BLOCK = Verification(
    by_block,
    standing_by_block,
    "the draft as a whole, with the same output distribution and on average at least as many tokens per call",
    by_round=True,
    name="block",
)
VERIFICATIONS = {way.name: way for way in (TOKEN, BLOCK)}


def verifications_of(sampler: Sampler) -> tuple[str, ...]:
    """The names of the ways to verify that rows of a sampler choose from; none for one that says none."""
    return tuple(way.name for way in ability_of(sampler, "verifications"))


def is_default(name: str) -> bool:
    """Whether this is the name of the default verification."""
    return name in VERIFICATIONS and VERIFICATIONS[name].default


def residual(pi: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """max(0, pi - q), unnormalised; pi if rounding leaves no mass."""
    weights = jnp.maximum(pi - q, 0.0)
    return jnp.where(jnp.sum(weights, axis=-1, keepdims=True) > 0, weights, pi)


def verify(
    accept_u: Float[Array, "B G"],
    draw_u: Float[Array, "B G+1"],
    draft: Draft,
    pi: Float[Array, "B G+1 V"],
    ways: Sequence[Verification] = (TOKEN,),
    way: Int[Array, " B"] | None = None,
) -> Verdict:
    """Steps 4 and 5 of GenSpecSample (Narasimhan et al., Algorithm 4): the output follows pi.

    accept_u and draw_u are independent uniforms, for each drafted position and each position at which a token
    may be drawn. `way` is the index of each row's verification in `ways`. The bonus position is treated as a
    rejection with q~ = 0, whose residual is pi.
    """
    (num_accepted, weights), *others = (each.accept(accept_u, draft, pi) for each in ways)
    for number, (accepted, other_weights) in enumerate(others, 1):
        chosen = jnp.asarray(way) == number
        num_accepted = jnp.where(chosen, accepted, num_accepted)
        weights = jnp.where(chosen[:, None], other_weights, weights)

    def stopped(x):
        index = num_accepted.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.take_along_axis(x, index, axis=1)[:, 0]

    bonus = (num_accepted == draft.size)[:, None]
    target = jnp.where(bonus, 1.0, stopped(weights)[:, None]) * stopped(pi)
    left = residual(target, jnp.where(bonus, 0.0, stopped(draft.probs)))
    return Verdict(num_accepted, draw(stopped(draw_u), left))


def deferred_drafts(delta: Array | None, draft: Draft) -> Int[Array, " B"]:
    """The number of drafted positions at which the rule defers; a per-token rule counts if it defers the
    drafted token."""
    if delta is None:
        return jnp.zeros_like(draft.size)
    delta = jnp.broadcast_to(delta, (*draft.probs.shape[:2], delta.shape[-1]))[:, :-1]
    if delta.shape[-1] > 1:
        delta = jnp.take_along_axis(delta, draft.tokens[..., None], axis=-1)
    return jnp.sum(delta[..., 0] & draft.inside, axis=1, dtype=jnp.int32)
