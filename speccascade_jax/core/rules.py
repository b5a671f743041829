"""Deferral rules and their target distributions (Narasimhan et al., Table 1).

METHODS declares each of them once. Flags, the HTTP schema, sweeps, tables and the tests of output
distributions derive from it.

A rule sets delta = 1 if the drafter's token is not good enough. One formula turns delta into the target
distribution that the output follows:

    pi(v) = (1 - delta(v)) q~(v) + p~(v) sum_u delta(u) q~(u)
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float

from speccascade_jax.core.methods import Knob, Method, Sweep, Target
from speccascade_jax.core.transforms import likeliest

Array = jax.Array
AT_ONCE = 16  # rejected tokens added at once in cactus_law; the fastest of 8, 16, 32 and 64 on CPUs
Alpha = float | Float[Array, "..."]  # one number, or one per row [B, 1, 1] or position [B, T, 1]


class Scores(NamedTuple):
    """Both models' distributions at every position, before and after temperature and truncation."""

    q: Float[Array, "*B V"]  # the drafter's distribution
    p: Float[Array, "*B V"]  # the verifier's distribution
    q_sampled: Float[Array, "*B V"]  # q~: after temperature, top-k and top-p
    p_sampled: Float[Array, "*B V"]  # p~
    greedy: Bool[Array, "..."]  # temperature 0: q~ and p~ are one-hot; [] or [B, 1, 1]


def target_probs(
    q: Float[Array, "*B V"], p: Float[Array, "*B V"], delta: Bool[Array, "*B W"]
) -> Float[Array, "*B V"]:
    """pi of the formula above; delta is [..., 1] (a position's) or [..., V] (a token's).

    >>> target_probs([.6, .3, .1], [.2, .3, .5], [True, False, False])
    [.12, .48, .40]
    """
    deferred = jnp.sum(jnp.where(delta, q, 0.0), axis=-1, keepdims=True)
    # The deferred mass of a position is exactly 0 or 1, whatever the sum of q rounds to.
    deferred = deferred if delta.shape[-1] > 1 else delta.astype(q.dtype)
    return jnp.where(delta, 0.0, q) + deferred * p


def _max(x: Array) -> Array:
    return jnp.max(x, axis=-1, keepdims=True)


def entropy(x: Float[Array, "*B V"]) -> Float[Array, "*B 1"]:
    """-sum_v x log x in nats."""
    return jnp.sum(jax.scipy.special.entr(x), axis=-1, keepdims=True)


def total_variation(p: Float[Array, "*B V"], q: Float[Array, "*B V"]) -> Float[Array, "*B 1"]:
    """sum_v max(0, p - q)."""
    return jnp.sum(jnp.maximum(p - q, 0.0), axis=-1, keepdims=True)


def speculative(s: Scores, alpha: Alpha) -> Array:
    """Always: pi = p~, lossless."""
    return jnp.ones((*s.q.shape[:-1], 1), bool)


def certainty(x: Float[Array, "*B V"]) -> Float[Array, "*B 1"]:
    """-H(x), which is for the log loss what max x is for the 0-1 loss."""
    return -entropy(x)


def chow(s: Scores, alpha: Alpha, by: Callable[[Array], Array] = _max, highest: float = 1.0) -> Array:
    """max q < 1 - alpha (Chow 1970); by certainty H(q) > alpha."""
    return by(s.q) < highest - alpha


def diff(s: Scores, alpha: Alpha, by: Callable[[Array], Array] = _max) -> Array:
    """max q < max p - alpha (Narasimhan et al., Table 1); by certainty H(q) > H(p) + alpha."""
    return by(s.q) < by(s.p) - alpha


def opt(s: Scores, alpha: Alpha, by: Callable[[Array], Array] = _max) -> Array:
    """max q < max p - alpha TV(p~, q~) (Lemma 4, eq. 10); by certainty App. C.2.

    At temperature 0 this is `diff` (Lemma 8): there TV is 0 or 1, and where the argmaxes agree
    both rules emit that token.
    """
    return diff(s, alpha * total_variation(s.p_sampled, s.q_sampled), by)


def lookahead(s: Scores, alpha: Alpha, acceptance: float, round_cost: float) -> Array:
    """`opt`, with a price of rejection that depends on the position in the round. The second to last axis is
    the round's positions, with the bonus position last; L(n) = 1 + a + .. + a^(n-1) is the number of tokens
    lost if n positions are left:

        max q < max p - alpha round_cost L(gamma - j) / L(gamma + 1) TV(p~, q~)        at position j
    """
    powers = acceptance ** jnp.arange(s.q.shape[-2], dtype=s.q.dtype)
    through = jnp.cumsum(powers)
    return opt(s, alpha * round_cost * (through - powers)[::-1, None] / through[-1])


def token_v1(s: Scores, alpha: Alpha) -> Array:
    """q(v) < max p - alpha, for each token v."""
    return s.q < _max(s.p) - alpha


def token_v2(s: Scores, alpha: Alpha) -> Array:
    """p(v) < max p - alpha, for each token v."""
    return s.p < _max(s.p) - alpha


def token_v3(s: Scores, alpha: Alpha) -> Array:
    """p(v) < (1 - alpha) max p, for each token v; the paper's best overall."""
    return s.p < (1.0 - alpha) * _max(s.p)


def bild_star(s: Scores, alpha: Alpha) -> Array:
    """-sum_v q(v) log p(v) > alpha; with greedy decoding, of the drafted token: -log p(argmax q)."""
    weights = jnp.where(s.greedy, s.q_sampled, s.q)
    return -jnp.sum(jax.scipy.special.xlogy(weights, s.p), axis=-1, keepdims=True) > alpha


def mixture(s: Scores, alpha: Alpha) -> tuple[Array, None]:
    """alpha q~ + (1 - alpha) p~ (an ensemble; DIVERSED's static form, arXiv 2604.07622)."""
    return alpha * s.q_sampled + (1.0 - alpha) * s.p_sampled, None


def typical(s: Scores, alpha: Alpha) -> Array:
    """p~(v) <= min(eps, sqrt(eps) exp(-H(p~))) with eps = 1 - alpha, for each token v (Medusa, Cai et al.
    2024, whose default is eps = 0.09).

    Medusa accepts all other drafted tokens regardless of q~, and draws from p~ after a rejection. So its
    output follows pi of the formula above with this delta.
    """
    eps = 1.0 - alpha
    return s.p_sampled <= jnp.minimum(eps, jnp.sqrt(eps) * jnp.exp(-entropy(s.p_sampled)))


def relaxed(s: Scores, alpha: Alpha, near: Callable[..., Array], relaxed_top_k: int) -> Array:
    """Defers unless a token is among the verifier's k most likely and `near` the best of them. With token_v2
    it is TensorRT-LLM's relaxed acceptance, p(v) < max p - alpha, and with token_v3 vLLM's, p(v) < (1 -
    alpha) max p.

    Both libraries decode greedily in this mode: a refused token is replaced by argmax p, which is p~ at
    temperature 0.
    """
    return near(s, alpha) | ~likeliest(jnp.log(s.p), relaxed_top_k, relaxed_top_k)


def raised(p: Float[Array, "*B V"], delta: Alpha) -> Float[Array, "*B V"]:
    """Cactus's probability of each token if that token is drafted: min(1, p + sqrt(2 delta p (1 - p)))
    (Hao and Mou, arXiv 2604.04987, Corollary 5)."""
    return jnp.minimum(p + jnp.sqrt(2.0 * delta * p * jnp.maximum(1.0 - p, 0.0)), 1.0)


def cactus_law(q: Float[Array, "*B V"], p: Float[Array, "*B V"], delta: Alpha) -> Float[Array, "*B V"]:
    """The output distribution of Cactus (Hao and Mou, arXiv 2604.04987, Theorem 2).

    Each drafted token n is verified against its own distribution h_n: h_n(n) = raised(p)(n), and the p of
    other tokens times s_n = (1 - h_n(n)) / (1 - p(n)). With the rejected mass R_n = max(0, q(n) - h_n(n)),

        out(v) = min(q(v), raised(p)(v)) + sum_n R_n max(0, s_n p(v) - q(v)) / sum_u max(0, s_n p(u) - q(u))

    With this as the target, accepting with probability min(1, out/q) and drawing from max(0, out - q) is the
    same procedure: a token that may be rejected has s_n p <= p < q for every n, so out is raised(p) there and
    at least q elsewhere. (The original draws its bonus token from p.)

    Each rejected token adds its own residual. These are added AT_ONCE at a time, the largest R_n first,
    because the drafter overrates few tokens. Tokens with s_n = 1, which are all at delta = 0, share one
    residual.
    """
    likelier = raised(p, delta)
    scale = jnp.where(p < 1.0, (1.0 - likelier) / jnp.where(p < 1.0, 1.0 - p, 1.0), 0.0)
    rejected = jnp.maximum(q - likelier, 0.0)

    def residuals(s: Float[Array, "*B K"], mass: Float[Array, "*B K"]) -> Float[Array, "*B V"]:
        parts = jnp.maximum(s[..., None] * p[..., None, :] - q[..., None, :], 0.0)
        total = jnp.sum(parts, axis=-1)
        return jnp.sum((mass / jnp.where(total > 0, total, 1.0))[..., None] * parts, axis=-2)

    def take(state: tuple[Array, Array]) -> tuple[Array, Array]:
        left, moved = state
        mass, which = lax.top_k(left, min(AT_ONCE, left.shape[-1]))
        moved += residuals(jnp.take_along_axis(scale, which, axis=-1), mass)
        return jnp.put_along_axis(left, which, 0.0, axis=-1, inplace=False), moved

    alike = jnp.sum(jnp.where(scale >= 1.0, rejected, 0.0), axis=-1, keepdims=True)
    start = jnp.where(scale >= 1.0, 0.0, rejected), residuals(jnp.ones_like(alike), alike)
    _, moved = lax.while_loop(lambda state: jnp.any(state[0] > 0), take, start)
    return jnp.minimum(q, likelier) + moved


def cactus(s: Scores, alpha: Alpha) -> tuple[Array, None]:
    return cactus_law(s.q_sampled, s.p_sampled, alpha), None


def tuned_beta(q: Float[Array, "*B V"], p: Float[Array, "*B V"], alpha: Alpha) -> Float[Array, "*B 1"]:
    """The beta >= 1 with sum max(0, p/beta - q) = R = sum max(0, q - p/(1-alpha)) (Tran-Thien 2023).

    Newton's iteration on the set S = {p > beta q}: beta <- P(S) / (R + Q(S)). It rises to the only root in
    about three steps (at most eleven in thousands of random cases). It is 1 if R = 0, where nothing is ever
    rejected.
    """
    rejected = total_variation(q, p / (1.0 - alpha))

    def step(state):
        count, _, beta = state
        above = p > beta * q
        mass = jnp.sum(jnp.where(above, p, 0.0), axis=-1, keepdims=True)
        drafted = jnp.sum(jnp.where(above, q, 0.0), axis=-1, keepdims=True)
        new = mass / jnp.where(rejected > 0, rejected + drafted, 1.0)
        return count + 1, beta, jnp.where(rejected > 0, jnp.maximum(beta, new), beta)

    start = jnp.ones_like(rejected)
    return lax.while_loop(lambda s: (s[0] < 20) & jnp.any(s[2] > s[1]), step, step((0, start, start)))[2]


def lossy_law(
    q: Float[Array, "*B V"], p: Float[Array, "*B V"], alpha: Alpha, beta: float | Float[Array, "*B 1"]
) -> Float[Array, "*B V"]:
    """The output distribution of lossy speculative sampling (Tran-Thien 2023; Lemma 2 if beta is tuned):

        out = min(q, p/(1-alpha)) + R max(0, p/beta - q) / sum max(0, p/beta - q)

    With this as the target, accepting with probability min(1, out/q) and drawing from max(0, out - q) is the
    lossy procedure itself: out = p/(1-alpha) where it rejects and out >= q elsewhere. Unlike T in Lemma 2 it
    sums to one for every beta, so the bonus position can follow it, and the output distribution does not
    depend on the block size. (The original draws its bonus token from p.)

    >>> lossy_law([.6, .3, .1], [.2, .3, .5], alpha=.4, beta=1.)
    [.333, .3, .367]
    """
    kept = jnp.minimum(q, p / (1.0 - alpha))
    rejected = total_variation(q, p / (1.0 - alpha))
    residual = jnp.maximum(p / beta - q, 0.0)
    mass = jnp.sum(residual, axis=-1, keepdims=True)
    return kept + rejected * residual / jnp.where(mass > 0, mass, 1.0)


def lossy(s: Scores, alpha: Alpha, tuned: bool = False) -> tuple[Array, None]:
    beta = tuned_beta(s.q_sampled, s.p_sampled, alpha) if tuned else 1.0
    return lossy_law(s.q_sampled, s.p_sampled, alpha, beta), None


def lossy_greedy(s: Scores, alpha: Alpha) -> tuple[Array, Array]:
    """Accept v iff p(v) >= (1 - alpha) max p, else emit argmax p (Leviathan et al. 2023, A.5)."""
    refused = token_v3(s, alpha)
    best = jax.nn.one_hot(jnp.argmax(s.p, axis=-1), s.p.shape[-1])
    return target_probs(s.q_sampled, best, refused), refused


def _cascade(rule: Callable[..., Array], *more: Any, knobs: Mapping[str, Knob] | None = None) -> Target:
    """The target distribution of a deferral rule."""
    defaults = {name: knob.default for name, knob in (knobs or {}).items()}

    def target(s: Scores, alpha: Alpha, **values: float) -> tuple[Array, Array]:
        delta = rule(s, alpha, *more, **defaults | values)
        return target_probs(s.q_sampled, s.p_sampled, delta), delta

    return target


PRICE = {
    "acceptance": Knob(0.8, 0, 1, "For lookahead: the assumed probability that a drafted token is accepted."),
    "round_cost": Knob(
        2.0, 0, math.inf, "For lookahead: the time of a round, in steps of the verifier.", above=True
    ),
}

RELAXED = {
    "relaxed_top_k": Knob(
        10,
        1,
        2**31 - 1,
        "For relaxed and relaxed_ratio: accept a drafted token only if it is among this many most likely "
        "tokens of the verifier.",
        kind=int,
    )
}

BENDS = Sweep(
    between=(0.92, 0.94, 0.96, 0.98, 0.99)
)  # for rules that change fastest when alpha is close to 1

METHODS: dict[str, Method] = {
    "speculative": Method(
        _cascade(speculative), 0, math.inf, "always defer; lossless", lossless=True, needs_q=False
    ),
    "chow": Method(_cascade(chow), 0, 1, "defer when max q < 1 - alpha"),
    "chow_log": Method(
        _cascade(chow, certainty, 0.0), 0, math.inf, "defer when H(q) > alpha", label="Chow (log)"
    ),
    "diff": Method(_cascade(diff), 0, 1, "defer when max q < max p - alpha"),
    "diff_log": Method(
        _cascade(diff, certainty), 0, math.inf, "defer when H(q) > H(p) + alpha", label="Diff (log)"
    ),
    "opt": Method(_cascade(opt), 0, math.inf, "defer when max q < max p - alpha TV(p, q)", label="OPT"),
    "opt_log": Method(
        _cascade(opt, certainty), 0, math.inf, "defer when H(q) > H(p) + alpha TV(p, q)", label="OPT (log)"
    ),
    "lookahead": Method(
        _cascade(lookahead, knobs=PRICE),
        0,
        math.inf,
        "opt, with each rejection priced by the tokens that are lost after it",
        by_prefix=False,
        knobs=PRICE,
    ),
    "token_v1": Method(_cascade(token_v1), 0, 1, "defer tokens with q(v) < max p - alpha", label="Token V1"),
    "token_v2": Method(
        _cascade(token_v2), 0, 1, "defer tokens with p(v) < max p - alpha", needs_q=False, label="Token V2"
    ),
    "token_v3": Method(
        _cascade(token_v3),
        0,
        1,
        "defer tokens with p(v) < (1 - alpha) max p",
        needs_q=False,
        label="Token V3",
        sweep=BENDS,
    ),
    "bild_star": Method(
        _cascade(bild_star),
        0,
        math.inf,
        "defer when -sum q log p > alpha",
        label="BiLD*",
        sweep=Sweep(scale=10.0),
    ),
    "router": Method(
        _cascade(opt), 0, math.inf, "opt, with a learned gain from deferring (--router)", trained=True
    ),
    "typical": Method(
        _cascade(typical), 0, 1, "defer tokens that are not typical of p (Medusa)", sweep=BENDS
    ),
    "relaxed": Method(
        _cascade(relaxed, token_v2, knobs=RELAXED),
        0,
        1,
        "defer tokens with p(v) < max p - alpha or outside p's top k (TensorRT-LLM)",
        needs_q=False,
        knobs=RELAXED,
    ),
    "relaxed_ratio": Method(
        _cascade(relaxed, token_v3, knobs=RELAXED),
        0,
        1,
        "defer tokens with p(v) < (1 - alpha) max p or outside p's top k (vLLM)",
        needs_q=False,
        knobs=RELAXED,
        sweep=BENDS,
    ),
    "mixture": Method(mixture, 0, 1, "alpha q + (1 - alpha) p", defers=False),
    "learned_mixture": Method(
        mixture, 0, 1, "mixture with learned weights (--router)", defers=False, trained=True
    ),
    "lossy": Method(lossy, 0, 0.999, "lossy speculative sampling, beta = 1", defers=False, sweep=BENDS),
    "lossy_tuned": Method(
        partial(lossy, tuned=True), 0, 0.999, "lossy with tuned beta", defers=False, sweep=BENDS
    ),
    "cactus": Method(
        cactus, 0, math.inf, "p of drafted tokens raised by sqrt(2 alpha p (1 - p)) (Cactus)", defers=False
    ),
    "lossy_greedy": Method(
        lossy_greedy, 0, 1, "accept iff p(v) >= (1 - alpha) max p, else argmax p", needs_q=False, sweep=BENDS
    ),
}
METHODS = {name: dataclasses.replace(method, name=name) for name, method in METHODS.items()}
TRAINED = tuple(name for name, method in METHODS.items() if method.trained)
