"""Searches for the models and block sizes with the least predicted time per token (see prediction.py)."""

import heapq
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.samplers import HandOver
from speccascade_jax.planning.prediction import (
    Candidates,
    Chain,
    PlannedHierarchy,
    check_rule,
    predict_chain,
    reads,
    renewals,
)

Array = np.ndarray


def best(
    candidates: Candidates, max_block: int = 15, hand_over: HandOver = "need", most_models: int | None = None
) -> PlannedHierarchy:
    """The plan with the least predicted seconds per token among all chains that end with the verifier, have
    block sizes 1 .. max_block and have at most most_models models. The verifier without a drafter is
    included.

    For `truncate` and `need` the result is optimal. For `keep` it is the best result of local searches from
    the `truncate` plans of max_block and every smaller value, and from the best pair. Raises FieldError for
    an unknown rule, for bounds below 1, and if calls of max_block + 1 tokens were not timed.
    """
    check_rule(hand_over)
    timed, max_models = candidates.call_seconds.shape[1] - 1, len(candidates.names)
    if not 1 <= max_block < timed:
        raise FieldError(
            "max_block",
            max_block,
            "it is at least 1, and calls of max_block + 1 tokens must be "
            f"timed: those of up to {timed} tokens were.",
        )
    if most_models is not None:
        if most_models < 1:
            raise FieldError("most_models", most_models, "it is at least 1 (the verifier alone).")
        max_models = min(max_models, most_models)
    if hand_over != "keep":
        return predict_chain(candidates, _cheapest(candidates, max_block, hand_over, max_models), hand_over)
    starts = {_cheapest(candidates, size, "truncate", max_models) for size in range(1, max_block + 1)}
    starts.add(_cheapest(candidates, max_block, "truncate", min(2, max_models)))  # its calls are timed
    return min(
        (
            _improved(candidates, chain, max_block, max_models)
            for chain in sorted(starts)
            if max(reads(chain[1], "keep")) <= timed
        ),
        key=lambda plan: plan.seconds_per_token,
    )


def _cheapest(candidates: Candidates, max_block: int, hand_over: str, max_models: int) -> Chain:
    """best() for `truncate` and `need`: a best-first search that builds chains from the verifier down.

    A chain's time is linear in the seconds that its smallest model, with any models added below it, takes to
    collect r = 1 .. max_block tokens: spent + weight @ seconds. Minimizing these seconds for each r
    separately gives a lower bound, which is usually close to the best chain.
    """
    verifier, sizes = len(candidates.names) - 1, range(1, max_block + 1)
    rounds = np.stack([renewals(candidates.survival[..., : size + 1], max_block) for size in sizes], axis=-2)
    ones, calls = candidates.call_seconds[:, 1], candidates.round_seconds[..., 1 : max_block + 1]
    alone, once = candidates.draft_seconds[:, 1 : max_block + 1], candidates.once
    bounds = _least(hand_over, rounds, calls, alone, max_models)
    tie = itertools.count()  # breaks ties, because chains cannot be compared
    cheapest: Chain = (verifier,), ()
    least, open_ = ones[verifier] + once[verifier], list[Any]()

    def look(chain: Chain, spent: Float[Array, "J S"], weight: Float[Array, "J S R"]) -> None:
        """Extends a chain by each drafter with each block size."""
        nonlocal cheapest, least
        count, (models, blocks) = len(weight), chain
        spent = spent + once[:count, None]

        def total(seconds: Float[Array, "J R"]) -> Float[Array, "J S"]:
            return spent + np.einsum("jsr,jr->js", weight, seconds[:count])

        ends, promised = total(alone), total(bounds[min(max_models - len(models), len(bounds) - 1)])
        j, s = np.unravel_index(np.argmin(ends), ends.shape)
        if ends[j, s] < least:
            cheapest, least = ((int(j), *models), (int(s) + 1, *blocks)), ends[j, s]
        for j, s in np.argwhere(promised < least):
            longer = (int(j), *models), (int(s) + 1, *blocks)
            heapq.heappush(open_, (promised[j, s], next(tie), longer, spent[j, s], weight[j, s]))

    if verifier and max_models > 1:
        per_token = np.array(
            [[candidates.rounds(j, np.ones(size + 1)) for size in sizes] for j in range(verifier)]
        )
        spent = calls[:verifier, verifier] * per_token + once[verifier]
        look(cheapest, spent, per_token[..., None] * np.eye(max_block))
    while open_ and open_[0][0] < least:
        _, _, chain, spent, weight = heapq.heappop(open_)
        i = chain[0][0]
        if i and len(chain[0]) < max_models:
            look(
                chain,
                spent + calls[:i, i] * (rounds[:i, i, :, 1:] @ weight),
                _below(hand_over, rounds[:i, i], weight),
            )
    return cheapest


def _below(
    hand_over: str, rounds: Float[Array, "J S columns"], weight: Float[Array, " R"]
) -> Float[Array, "J S R"]:
    """How often a model requests 1, 2, .. tokens from the model below if it collects r tokens weight[r - 1]
    times."""
    width = len(weight)
    if hand_over == "truncate":
        return (rounds[..., 1:] @ weight)[..., None] * np.eye(width)
    left = np.arange(width)
    later = np.pad(weight, (0, width))[left[:, None] + left]  # [lag, q - 1]: weight[q + lag - 1]
    begun = np.diff(rounds, axis=-1) @ later  # the number of rounds that begin with q = 1, 2, .. tokens to go
    request = np.minimum(left, left[:, None] + 1)  # [s - 1, q - 1]: min(s, q - 1)
    return np.einsum("jsq,sqr->jsr", begun, (request[..., None] == left + 1).astype(float))


def _least(
    hand_over: str,
    rounds: Float[Array, "M M S columns"],
    calls: Float[Array, "M M S"],
    alone: Float[Array, "M R"],
    max_models: int,
) -> list[Float[Array, "M R"]]:
    """[n][i, r - 1]: a lower bound of the seconds in which a chain of at most n models (for n = 0: one model)
    that ends with model i collects r tokens. The last entry also holds for any larger n."""
    count, width = alone.shape
    bounds, left = [alone, alone], np.arange(width)
    request = np.minimum(left, left[:, None] + 1)  # [s - 1, q - 1]: min(s, q - 1)
    unbounded = max_models >= count
    while len(bounds) < max_models:
        below, least = bounds[-1], alone.copy()
        for i in range(1, count):
            spent = rounds[:i, i, :, 1:] * calls[:i, i, :, None]
            shorter = (least if unbounded else below)[:i]
            if hand_over == "truncate":
                every = spent + rounds[:i, i, :, 1:] * shorter[:, :, None]
            else:
                blocks = np.pad(shorter, ((0, 0), (1, 0)))[:, request]
                lags = np.diff(rounds[:i, i], axis=-1)
                for lag in left:
                    spent[..., lag:] += lags[..., lag, None] * blocks[..., : width - lag]
                every = spent
            least[i] = np.minimum(least[i], every.min(axis=(0, 1)))
        if unbounded:
            return [least]
        if np.array_equal(least, below):
            break
        bounds.append(least)
    return bounds


def _improved(candidates: Candidates, chain: Chain, max_block: int, max_models: int) -> PlannedHierarchy:
    """The result of a local search under `keep`."""

    def tried(chain: Chain) -> tuple[PlannedHierarchy, Chain]:
        return predict_chain(candidates, chain, "keep"), chain

    timed, (plan, chain) = candidates.call_seconds.shape[1] - 1, tried(chain)
    while True:
        near = [
            tried(other)
            for other in _neighbours(*chain, max_block)
            if len(other[0]) <= max_models and max(reads(other[1], "keep")) <= timed
        ]
        better, chain = min(near, key=lambda pair: pair[0].seconds_per_token, default=(plan, chain))
        if better.seconds_per_token >= plan.seconds_per_token:
            return plan
        plan = better


def _neighbours(models: tuple[int, ...], sizes: tuple[int, ...], max_block: int) -> Iterator[Chain]:
    """The chains with one block size or model changed, one drafter removed, or one added."""
    for k in range(len(models)):
        free = range(models[k - 1] + 1 if k else 0, models[k])  # between two models of the chain
        for size in range(1, max_block + 1):
            yield from (((*models[:k], model, *models[k:]), (*sizes[:k], size, *sizes[k:])) for model in free)
            if k < len(sizes):
                yield models, (*sizes[:k], size, *sizes[k + 1 :])
        if k < len(sizes):
            yield models[:k] + models[k + 1 :], sizes[:k] + sizes[k + 1 :]
            others = range(free.start, models[k + 1])
            yield from (((*models[:k], model, *models[k + 1 :]), sizes) for model in others)
