"""Which models, and which block sizes, have the least predicted time per token (see prediction.py)."""

import heapq
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float

from speccascade_jax.core.samplers import HandOver
from speccascade_jax.planning.prediction import (
    Candidates,
    Chain,
    Plan,
    check_rule,
    predict_chain,
    reads,
    renewals,
)

Array = np.ndarray


def best(candidates: Candidates, max_block: int = 15, hand_over: HandOver = "need",
         most_models: int | None = None) -> Plan:
    """The plan with the least predicted seconds per token, of all chains that end with the target, have block
    sizes 1 .. max_block, and have at most most_models models. The target without a drafter is one of them.

    For `truncate` and `need` this is the least. For `keep` it is the best end of a local search from the
    `truncate` plans of max_block and every smaller one, and from the best pair.
    Raises ValueError for an unknown rule, bounds below 1, and calls of max_block + 1 tokens that were not
    timed.
    """
    check_rule(hand_over)
    timed, most = candidates.call_seconds.shape[1] - 1, len(candidates.names)
    if not 1 <= max_block < timed:
        raise ValueError(f"max_block is {max_block} and calls of up to {timed} tokens were timed; it is at "
                         "least 1, and calls of max_block + 1 tokens must be timed.")
    if most_models is not None:
        if most_models < 1:
            raise ValueError(f"most_models is {most_models}; it is at least 1 (the target alone).")
        most = min(most, most_models)
    if hand_over != "keep":
        return predict_chain(candidates, _cheapest(candidates, max_block, hand_over, most), hand_over)
    starts = {_cheapest(candidates, size, "truncate", most) for size in range(1, max_block + 1)}
    starts.add(_cheapest(candidates, max_block, "truncate", min(2, most)))  # its calls are surely timed
    return min((_improved(candidates, chain, max_block, most) for chain in sorted(starts)
                if max(reads(chain[1], "keep")) <= timed), key=lambda plan: plan.seconds_per_token)


def _cheapest(candidates: Candidates, max_block: int, hand_over: str, most: int) -> Chain:
    """`best` for `truncate` and `need`: a chain is built from the target down, the most promising first.

    What it takes is linear in the seconds that its smallest model, with whatever is below, takes to collect
    r = 1 .. max_block tokens: `spent` + weight @ seconds. The least seconds for each r by itself, of another
    chain for each r, are a bound that no chain is below, and rarely far from the best.
    """
    target, sizes = len(candidates.names) - 1, range(1, max_block + 1)
    rounds = np.stack([renewals(candidates.acceptance, size, max_block) for size in sizes], axis=-2)
    ones, calls = candidates.call_seconds[:, 1], candidates.round_seconds[..., 1:max_block + 1]
    alone, own = ones[:, None] * np.array(sizes), candidates.once
    bounds = _least(hand_over, rounds, calls, alone, most)
    tie = itertools.count()  # chains that promise the same are not compared
    found: Chain = (target,), ()
    least, open_ = ones[target] + own[target], list[Any]()

    def look(chain: Chain, spent: Float[Array, "J S"], weight: Float[Array, "J S R"]) -> None:
        """At `chain` with each drafter and each block size."""
        nonlocal found, least
        count, (models, blocks) = len(weight), chain
        spent = spent + own[:count, None]

        def total(seconds: Float[Array, "J R"]) -> Float[Array, "J S"]:
            return spent + np.einsum("jsr,jr->js", weight, seconds[:count])

        ends, promised = total(alone), total(bounds[min(most - len(models), len(bounds) - 1)])
        j, s = np.unravel_index(np.argmin(ends), ends.shape)
        if ends[j, s] < least:
            found, least = ((int(j), *models), (int(s) + 1, *blocks)), ends[j, s]
        for j, s in np.argwhere(promised < least):
            longer = (int(j), *models), (int(s) + 1, *blocks)
            heapq.heappush(open_, (promised[j, s], next(tie), longer, spent[j, s], weight[j, s]))

    if target and most > 1:
        per_token = np.array([[candidates.rounds(candidates.acceptance[j, target]**np.arange(size + 1))
                               for size in sizes] for j in range(target)])
        spent = calls[:target, target] * per_token + own[target]
        look(found, spent, per_token[..., None] * np.eye(max_block))
    while open_ and open_[0][0] < least:
        _, _, chain, spent, weight = heapq.heappop(open_)
        i = chain[0][0]
        if i and len(chain[0]) < most:
            look(chain, spent + calls[:i, i] * (rounds[:i, i, :, 1:] @ weight),
                 _below(hand_over, rounds[:i, i], weight))
    return found


def _below(hand_over: str, rounds: Float[Array, "J S columns"], weight: Float[Array, " R"]
           ) -> Float[Array, "J S R"]:
    """How often a model that collects r tokens, weight[r - 1] times, asks for 1, 2, .. of the model below."""
    most = len(weight)
    if hand_over == "truncate":
        return (rounds[..., 1:] @ weight)[..., None] * np.eye(most)
    left = np.arange(most)
    later = np.pad(weight, (0, most))[left[:, None] + left]  # [lag, q - 1]: weight[q + lag - 1]
    begun = np.diff(rounds, axis=-1) @ later  # how many rounds begin with q = 1, 2, .. to go
    asked = np.minimum(left, left[:, None] + 1)  # [s - 1, q - 1]: min(s, q - 1)
    return np.einsum("jsq,sqr->jsr", begun, (asked[..., None] == left + 1).astype(float))


def _least(hand_over: str, rounds: Float[Array, "M M S columns"], calls: Float[Array, "M M S"],
           alone: Float[Array, "M R"], most: int) -> list[Float[Array, "M R"]]:
    """[n][i, r - 1]: seconds in which no chain of at most n models (one for n = 0) up to i collects r tokens
    sooner; the last of them holds for any larger n, too."""
    count, width = alone.shape
    found, left = [alone, alone], np.arange(width)
    asked = np.minimum(left, left[:, None] + 1)  # [s - 1, q - 1]: min(s, q - 1)
    unbounded = most >= count
    while len(found) < most:
        below, least = found[-1], alone.copy()
        for i in range(1, count):
            own = rounds[:i, i, :, 1:] * calls[:i, i, :, None]
            shorter = (least if unbounded else below)[:i]
            if hand_over == "truncate":
                every = own + rounds[:i, i, :, 1:] * shorter[:, :, None]
            else:
                blocks = np.pad(shorter, ((0, 0), (1, 0)))[:, asked]
                lags = np.diff(rounds[:i, i], axis=-1)
                for lag in left:
                    own[..., lag:] += lags[..., lag, None] * blocks[..., :width - lag]
                every = own
            least[i] = np.minimum(least[i], every.min(axis=(0, 1)))
        if unbounded:
            return [least]
        if np.array_equal(least, below):
            break
        found.append(least)
    return found


def _improved(candidates: Candidates, chain: Chain, max_block: int, most: int) -> Plan:
    """Where the local search ends under `keep`."""
    def tried(chain: Chain) -> tuple[Plan, Chain]:
        return predict_chain(candidates, chain, "keep"), chain

    timed, (plan, chain) = candidates.call_seconds.shape[1] - 1, tried(chain)
    while True:
        near = [tried(other) for other in _neighbours(*chain, max_block)
                if len(other[0]) <= most and max(reads(other[1], "keep")) <= timed]
        better, chain = min(near, key=lambda one: one[0].seconds_per_token, default=(plan, chain))
        if better.seconds_per_token >= plan.seconds_per_token:
            return plan
        plan = better


def _neighbours(models: tuple[int, ...], sizes: tuple[int, ...], max_block: int) -> Iterator[Chain]:
    """Chains with another block size, another drafter, one drafter fewer, or one more."""
    for k in range(len(models)):
        free = range(models[k - 1] + 1 if k else 0, models[k])  # between two models of the chain
        for size in range(1, max_block + 1):
            yield from (((*models[:k], model, *models[k:]), (*sizes[:k], size, *sizes[k:])) for model in free)
            if k < len(sizes):
                yield models, (*sizes[:k], size, *sizes[k + 1:])
        if k < len(sizes):
            yield models[:k] + models[k + 1:], sizes[:k] + sizes[k + 1:]
            others = range(free.start, models[k + 1])
            yield from (((*models[:k], model, *models[k + 1:]), sizes) for model in others)
