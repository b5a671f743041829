"""METHODS: what --method may name besides baselines, each a target distribution.

    METHODS["token_v3"].target(scores, 0.2)    # pi [B, T, V] and delta [B, T, V]
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from speccascade_jax.core import rules
from speccascade_jax.core.rules import Alpha, Scores, certainty, target_probs

Array = jax.Array
SINGLE_MODEL = {"verifier": "the large model alone", "drafter": "the small model alone"}
Target = Callable[[Scores, Alpha], tuple[Array, Array | None]]


@dataclasses.dataclass(frozen=True)
class Method:
    """A target distribution: (scores, alpha) -> (pi, delta), delta None where nothing `defers`."""

    target: Target
    low: float   # alpha's bounds, both included
    high: float
    summary: str  # for people
    defers: bool = True
    lossless: bool = False  # pi = p~, whatever q is
    by_prefix: bool = True  # pi depends on the prefix alone, not on where in a round a position is
    trained: bool = False  # a network, read from a file
    name: str = ""  # for people, of one that METHODS does not hold


def _cascade(rule: Callable[..., Array], *more: Any) -> Target:
    def target(s: Scores, alpha: Alpha) -> tuple[Array, Array]:
        delta = rule(s, alpha, *more)
        return target_probs(s.q_sampled, s.p_sampled, delta), delta

    return target


METHODS: dict[str, Method] = {
    "speculative": Method(_cascade(rules.speculative), 0, math.inf, "always defer: lossless", lossless=True),
    "chow": Method(_cascade(rules.chow), 0, 1, "defer when max q < 1 - alpha"),
    "chow_log": Method(_cascade(rules.chow, certainty, 0.0), 0, math.inf, "defer when H(q) > alpha"),
    "diff": Method(_cascade(rules.diff), 0, 1, "defer when max q < max p - alpha"),
    "diff_log": Method(_cascade(rules.diff, certainty), 0, math.inf, "defer when H(q) > H(p) + alpha"),
    "opt": Method(_cascade(rules.opt), 0, math.inf, "defer when max q < max p - alpha TV(p, q)"),
    "opt_log": Method(_cascade(rules.opt, certainty), 0, math.inf, "defer when H(q) > H(p) + alpha TV(p, q)"),
    "lookahead": Method(_cascade(rules.lookahead, 0.8, 2.0), 0, math.inf,
                        "as opt, a rejection at the price of what is lost after it", by_prefix=False),
    "token_v1": Method(_cascade(rules.token_v1), 0, 1, "defer tokens with q(v) < max p - alpha"),
    "token_v2": Method(_cascade(rules.token_v2), 0, 1, "defer tokens with p(v) < max p - alpha"),
    "token_v3": Method(_cascade(rules.token_v3), 0, 1, "defer tokens with p(v) < (1 - alpha) max p"),
    "bild_star": Method(_cascade(rules.bild_star), 0, math.inf, "defer when -sum q log p > alpha"),
    "router": Method(_cascade(rules.opt), 0, math.inf, "as opt, the gain of deferring learnt (--router)",
                     trained=True),
    "typical": Method(_cascade(rules.typical), 0, 1, "defer tokens that are not typical of p (Medusa)"),
    "mixture": Method(rules.mixture, 0, 1, "alpha q + (1 - alpha) p", defers=False),
    "learned_mixture": Method(rules.mixture, 0, 1, "mixture, learnt weights (--router)",
                              defers=False, trained=True),
    "lossy": Method(rules.lossy, 0, 0.999, "lossy speculative sampling, beta = 1", defers=False),
    "lossy_tuned": Method(partial(rules.lossy, tuned=True), 0, 0.999, "lossy with tuned beta", defers=False),
    "lossy_greedy": Method(rules.lossy_greedy, 0, 1, "accept iff p(v) >= (1 - alpha) max p, else argmax p"),
}
TRAINED = tuple(name for name, method in METHODS.items() if method.trained)
