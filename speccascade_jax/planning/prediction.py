"""Predicted seconds per token of a plan: one model, or a hierarchy of models.

A hierarchy (Mohri et al., arXiv 2510.19705) is a chain of models from small to large. The smallest drafts
token by token. Each other model verifies blocks collected by the model below, and collects the tokens that it
emits until it has as many as the model above requests. The last model is the verifier, whose distribution the
output follows; every level is lossless. The models of a chain are numbered 0 .. K. s_i is the number of
tokens that model i + 1 requests from model i (the block size), a_i the probability that model i accepts a
token of model i - 1, and c_i the seconds of one call of model i. c_i includes the fixed cost of a round in
which model i - 1 drafts, because the weights of model i must return to the processor's caches.

The number of accepted tokens of a draft depends on the verification and on how much the difficulty of
passages varies. For the verifier, both are measured on its texts (runs.py). Between the models below it,
tokens are assumed to be accepted independently with probability a_i; varying difficulty or block verification
leads to slightly more accepted tokens.

A hand-over rule decides what a model does with tokens beyond those requested:

- `truncate` throws them away;
- `need` avoids them: with r tokens to go it verifies min(s, r - 1) drafts. The text is the same as with
  `truncate`, from fewer drafts;
- `keep` hands them over as well, which makes blocks longer.

Calls have a static width: each costs as much as one for the longest block, however few tokens it reads. A
text costs more than its rounds: every model of the chain reads the source, and surplus tokens of the last
round are lost. The prediction includes both if lengths and fixed costs of texts are given.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, get_args

import numpy as np
from jaxtyping import Float

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.samplers import HandOver
from speccascade_jax.planning.runs import Runs, chances

Array = np.ndarray
HAND_OVER = get_args(HandOver)
Chain = tuple[tuple[int, ...], tuple[int, ...]]  # models, smallest first, and their block sizes


@dataclasses.dataclass(frozen=True, eq=False)
class Candidates:
    """The models that a plan may use, and their measurements. The last one is the verifier.

    names: smallest first. call_seconds[i, n]: seconds of one call of model i that reads n >= 1 tokens; column
    0 is ignored. acceptance[j, i]: probability that model i accepts a token of model j < i, the mean of sum_v
    min(p_j(v), p_i(v)); entries with j >= i are ignored. besides[j, i]: fixed seconds of a round of model i
    that is drafted by model j < i, without the calls of both; entries with j >= i are ignored. lengths: the
    tokens of typical texts; if empty, one endless text is assumed. text_seconds[i]: the fixed seconds of a
    text due to model i, without its calls; the verifier's include the costs of every text. It is ignored
    without lengths. runs[j, i]: the numbers of accepted tokens in drafts of model j for texts of model i; for
    a pair without runs, tokens are accepted independently with probability acceptance[j, i]. at_once: the
    smaller of two models writes a draft in one call, which reads as many tokens as the verifier's; without
    it, a model that drafts alone reads one token per call. Raises FieldError for other shapes, a name that
    occurs twice, seconds that are not positive numbers, acceptances outside [0, 1], lengths below 1, and a
    third model with `at_once`.
    """

    names: tuple[str, ...]
    call_seconds: Float[Array, "M columns"]
    acceptance: Float[Array, "M M"]
    lengths: tuple[int, ...] = ()
    text_seconds: Any = None  # [M]; None: zeros
    besides: Any = None  # [M, M]; None: zeros
    runs: Mapping[tuple[int, int], Runs] = dataclasses.field(default_factory=dict)
    at_once: bool = False
    survival: Float[Array, "M M N"] = dataclasses.field(init=False)
    """[j, i, x]: the probability that model i accepts the first x tokens that model j drafts."""

    def __post_init__(self) -> None:
        names, count = tuple(self.names), len(self.names)
        seconds, acceptance = (np.array(x, np.float64) for x in (self.call_seconds, self.acceptance))
        once = np.zeros(count) if self.text_seconds is None else np.array(self.text_seconds, np.float64)
        if count == 0 or len(set(names)) < count:
            raise FieldError(
                "names", names, "give each model another name.", f"{count} names, {len(set(names))} different"
            )
        if seconds.ndim != 2 or len(seconds) != count or seconds.shape[1] < 2:
            raise FieldError(
                "call_seconds",
                seconds.shape,
                f"{count} models need ({count}, N + 1), where N >= 1 is the most tokens of a timed call.",
                f"call_seconds has shape {seconds.shape}",
            )
        if acceptance.shape != (count, count):
            raise FieldError(
                "acceptance",
                acceptance.shape,
                f"{count} models need ({count}, {count}).",
                f"acceptance has shape {acceptance.shape}",
            )
        for i, n in np.argwhere(~(np.isfinite(seconds) & (seconds > 0))[:, 1:])[:1]:
            raise FieldError(
                "call_seconds",
                seconds[i, n + 1],
                "it must be a positive number: time that call.",
                f"call_seconds of {names[i]} for {n + 1} tokens is {seconds[i, n + 1]}",
            )
        acceptance = np.triu(acceptance, 1)
        for j, i in np.argwhere(~((acceptance >= 0) & (acceptance <= 1)))[:1]:
            raise FieldError(
                "acceptance",
                acceptance[j, i],
                "it must be in [0, 1].",
                f"acceptance of {names[j]}'s tokens by {names[i]} is {acceptance[j, i]}",
            )
        if once.shape != (count,) or not (np.isfinite(once) & (once >= 0)).all():
            raise FieldError(
                "text_seconds", once.tolist(), f"{count} models need {count} numbers, each at least 0."
            )
        if self.at_once and count > 2:
            raise FieldError(
                "names", names, "give that model and its verifier.", "one call writes a draft for one model"
            )
        if min(self.lengths, default=1) < 1:
            raise FieldError("lengths", min(self.lengths), "a text has at least one token.")
        besides = np.zeros((count, count)) if self.besides is None else np.array(self.besides, np.float64)
        if besides.shape != (count, count) or not (np.triu(besides, 1) >= 0).all():
            raise FieldError(
                "besides",
                besides.tolist(),
                f"{count} models need ({count}, {count}) numbers, each at least 0.",
            )
        besides = np.triu(besides, 1)
        for field, value in (
            ("names", names),
            ("call_seconds", seconds),
            ("acceptance", acceptance),
            ("text_seconds", once),
            ("besides", besides),
            ("survival", self._survival(acceptance, seconds.shape[1] - 1)),
        ):
            object.__setattr__(self, field, value)

    def _survival(self, acceptance: Float[Array, "M M"], timed: int) -> Float[Array, "M M N"]:
        survival = acceptance[..., None] ** np.arange(timed)
        for pair, runs in self.runs.items():
            longest = runs.stands.shape[-1] - 1
            if longest < timed - 1:
                raise FieldError(
                    "runs",
                    longest,
                    f"calls of {timed} tokens read drafts of {timed - 1}.",
                    f"{self.names[pair[0]]}'s drafts have {longest} tokens",
                )
            survival[pair] = runs.survival(timed - 1)
        return survival

    @property
    def round_seconds(self) -> Float[Array, "M M columns"]:
        """[j, i, s]: seconds of a round of model i that reads s tokens, drafted by model j, without the
        drafting."""
        return self.call_seconds[:, 1:] + self.besides[..., None]

    @property
    def draft_seconds(self) -> Float[Array, "M columns"]:
        """[i, s]: seconds that model i takes to write a draft of s >= 1 tokens without a drafter."""
        seconds = np.arange(self.call_seconds.shape[1] - 1) * self.call_seconds[:, 1:2]
        if self.at_once:
            seconds[0] = self.call_seconds[0, 1:]
        return seconds

    @property
    def once(self) -> Float[Array, " M"]:
        """text_seconds per token."""
        return self.text_seconds / (np.mean(self.lengths) if self.lengths else np.inf)

    def rounds(self, drafter: int, at_least: Float[Array, " n"]) -> float:
        """The verifier's calls per token, if P(a draft has x tokens or more) is at_least[x]."""
        last = len(self.names) - 1
        if (drafter, last) in self.runs:
            return self.runs[drafter, last].calls_per_token(at_least)
        survives = self.survival[drafter, last, : len(at_least)] * at_least
        if not self.lengths:
            return float(1 / survives.sum())
        rounds = renewals(survives, max(self.lengths))[..., self.lengths]
        return float(rounds.mean() / np.mean(self.lengths))


@dataclasses.dataclass(frozen=True)
class PlannedHierarchy:
    """A chain of models, or the verifier alone (without block sizes), and its predictions."""

    models: tuple[str, ...]  # smallest first
    block_sizes: tuple[int, ...]  # tokens that each model but the smallest requests
    hand_over: HandOver
    seconds_per_token: float  # including the share of a text's fixed costs
    passes_per_token: tuple[float, ...]  # each model's calls per committed token, comparable with counters


def expected_tokens(a: Float[Array, "..."] | float, n: int) -> Any:
    """(1 - a^(n+1)) / (1 - a): the expected number of tokens that a verification of n drafts emits if each is
    accepted with probability a."""
    return sum(np.asarray(a, np.float64) ** x for x in range(n + 1))


def even_acceptance(survives: Float[Array, " L"]) -> float:
    """The acceptance a at which expected_tokens(a, L - 1) equals the expected number of tokens of a
    verification that emits more than x tokens with probability survives[x]."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        enough = expected_tokens(middle, len(survives) - 1) >= survives.sum()
        low, high = (low, middle) if enough else (middle, high)
    return high


def renewal(a: Float[Array, "..."] | float, n: int, m: int) -> Float[Array, "..."]:
    """gamma(a, n, m): the expected number of verifications of n drafts each until at least m tokens are
    collected.

    gamma(m) = 1 + sum_x P(X = x) gamma(m - x) and gamma(m <= 0) = 0, where X is the number of tokens that one
    verification emits: P(X = x) = a^(x-1) (1 - a) for x <= n and P(X = n + 1) = a^n. Raises FieldError for a
    negative n or m.
    """
    if n < 0 or m < 0:
        field, value = ("n", n) if n < 0 else ("m", m)
        raise FieldError(field, value, "neither may be negative.", f"{n} drafts and {m} tokens")
    return renewals(np.asarray(a, np.float64)[..., None] ** np.arange(n + 1), m)[..., m]


def renewals(survives: Float[Array, "*A L"], tokens: int) -> Float[Array, "*A columns"]:
    """The expected number of draws of X until their sum is at least m, for m = 0 .. tokens. survives[x] is
    P(X > x), and survives[0] = 1."""
    law = chances(survives)
    rounds = np.zeros((*law.shape[:-1], tokens + 1))
    for m in range(1, tokens + 1):
        width = min(law.shape[-1], m)
        rounds[..., m] = 1 + np.vecdot(law[..., 1:width], rounds[..., m - width + 1 : m][..., ::-1])
    return rounds


def triangle_violations(
    acceptance: Float[Array, "M M"], tolerance: float = 0.02
) -> list[tuple[int, int, int, float]]:
    """The tuples (j, i, k, excess) with j < i < k and excess = (1 - a_jk) - (1 - a_ji) - (1 - a_ik) >
    tolerance, the largest first. 1 - a is a total variation distance, which obeys the triangle inequality in
    every context. An excess means that the three were measured on different texts, or on too few."""
    distance = 1 - np.asarray(acceptance, np.float64)
    excess = distance[:, None, :] - distance[:, :, None] - distance[None, :, :]
    j, i, k = np.indices(excess.shape)
    triples = np.argwhere((j < i) & (i < k) & (excess > tolerance)).tolist()
    return sorted(((j, i, k, float(excess[j, i, k])) for j, i, k in triples), key=lambda triple: -triple[3])


def predict(
    candidates: Candidates, models: Sequence[str], block_sizes: Sequence[int], hand_over: HandOver = "need"
) -> PlannedHierarchy:
    """Predicts the cost of a chain of models: sum_i c_i passes_i seconds per token, where passes_i is the
    number of calls of model i per token, plus a text's fixed cost per token.

    models: names, smallest first; block_sizes: one for each but the smallest. For `truncate` and `need` the
    mean is exact although a token's acceptances at two levels depend on each other, because block lengths are
    fixed and the number of rounds is a stopping time. For `keep` it is an approximation, because a block's
    length carries information about its tokens. A call of model i reads s_(i-1) + 1 tokens, with `keep` s_0 +
    .. + s_(i-1) + 1. Raises FieldError for an unknown model or rule, models out of order, a wrong number of
    block sizes or one below 1, and calls wider than those timed.
    """
    check_rule(hand_over)
    unknown = [name for name in models if name not in candidates.names]
    if unknown or not models:
        raise FieldError(
            "models",
            list(models),
            f"name at least one of {', '.join(candidates.names)}.",
            f"of the models {list(models)}, {unknown} are unknown",
        )
    chosen = tuple(candidates.names.index(name) for name in models)
    if list(chosen) != sorted(set(chosen)):
        raise FieldError(
            "models",
            list(models),
            "the candidates' order, each at most once, is "
            f"{[candidates.names[i] for i in sorted(set(chosen))]}.",
        )
    if len(block_sizes) != len(chosen) - 1:
        raise FieldError(
            "block_sizes", list(block_sizes), f"{len(chosen)} models need {len(chosen) - 1} of them."
        )
    if any(not isinstance(size, int | np.integer) or size < 1 for size in block_sizes):
        raise FieldError("block_sizes", list(block_sizes), "each must be an integer of at least 1.")
    sizes = tuple(map(int, block_sizes))
    widest, timed = max(reads(sizes, hand_over)), candidates.call_seconds.shape[1] - 1
    if widest > timed:
        raise FieldError(
            "block_sizes",
            list(block_sizes),
            "time wider calls or use smaller blocks.",
            f"block sizes {list(block_sizes)} need calls that read {widest} tokens, and {timed} is "
            "the most that was timed",
        )
    return predict_chain(candidates, (chosen, sizes), hand_over)


def check_rule(hand_over: HandOver) -> None:
    if hand_over not in HAND_OVER:
        raise FieldError("hand_over", hand_over, f"the rules are {', '.join(HAND_OVER)}.")


def predict_chain(candidates: Candidates, chain: Chain, hand_over: HandOver) -> PlannedHierarchy:
    """predict() without checks."""
    chosen, sizes = chain
    survival = [candidates.survival[pair] for pair in pairwise(chosen)]
    passes = _passes(survival, sizes, hand_over, lambda at_least: candidates.rounds(chosen[-2], at_least))
    once, read = candidates.once[list(chosen)].sum(), reads(sizes, hand_over)
    if candidates.at_once and sizes:
        passes, read = passes[[1, 1]], (read[1], read[1])
    seconds = float(
        candidates.call_seconds[chosen, read] @ passes
        + once
        + sum(
            candidates.besides[pair] * count for pair, count in zip(pairwise(chosen), passes[1:], strict=True)
        )
    )
    names = tuple(candidates.names[i] for i in chosen)
    return PlannedHierarchy(names, sizes, hand_over, seconds, tuple(map(float, passes)))


def reads(sizes: tuple[int, ...], hand_over: str) -> tuple[int, ...]:
    """The number of tokens that each model's calls read: the last committed token and the longest block from
    below."""
    longest = np.cumsum(sizes, dtype=int) if hand_over == "keep" else sizes
    return (1, *(int(size) + 1 for size in longest))


def _passes(
    survival: Sequence[Float[Array, " N"]],
    sizes: tuple[int, ...],
    hand_over: str,
    rounds_per_token: Callable[[Float[Array, " n"]], float],
) -> Float[Array, " K+1"]:
    """Each model's calls per committed token."""
    unit = np.eye(len(sizes) + 1)
    if not sizes:
        return unit[0]
    if hand_over == "keep":
        calls, at_least = sizes[0] * unit[0], np.ones(sizes[0] + 1)  # P(a block has x tokens or more)
        for i in range(1, len(sizes)):
            stands = survival[i - 1][: len(at_least)] * at_least
            number, at_least = _first_passage(stands, sizes[i])
            calls = number * (unit[i] + calls)
        return (unit[-1] + calls) * rounds_per_token(at_least)
    largest = max(sizes)
    calls = np.arange(largest + 1)[:, None] * unit[0]  # [r]: the current level is asked for r tokens
    for i in range(1, len(sizes)):
        drafts = sizes[i - 1]
        rounds = renewals(survival[i - 1][: drafts + 1], largest)
        if hand_over == "need":
            below = begins(rounds) @ calls[np.minimum(drafts, np.arange(largest))]
            calls = rounds[:, None] * unit[i] + np.pad(below, ((1, 0), (0, 0)))
        else:
            calls = rounds[:, None] * (unit[i] + calls[drafts])
    return (unit[-1] + calls[sizes[-1]]) * rounds_per_token(np.ones(sizes[-1] + 1))


def _first_passage(survives: Float[Array, " L"], need: int) -> tuple[float, Float[Array, " D"]]:
    """The expected number of verifications until at least `need` tokens are collected, and P(x or more are
    collected then)."""
    law = chances(survives)
    visits = np.zeros(need + len(law) - 1)  # [x]: the probability of ever having x tokens
    visits[0] = 1.0
    for x in range(need):
        visits[x : x + len(law)] += visits[x] * law
    rounds, visits[:need] = float(visits[:need].sum()), 0.0
    return rounds, np.cumsum(visits[::-1])[::-1]


def begins(rounds: Float[Array, "*A columns"]) -> Float[Array, "*A R R"]:
    """[r - 1, q - 1]: the probability that one of the rounds that collect r tokens begins with q tokens to
    go. It is a function of r - q whose sum over q is gamma(r), hence the difference of gamma."""
    lag = np.arange(rounds.shape[-1] - 1)
    lag = lag[:, None] - lag
    return np.where(lag >= 0, np.diff(rounds, axis=-1)[..., np.maximum(lag, 0)], 0.0)
