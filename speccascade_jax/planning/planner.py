"""Which models, and which block sizes, have the least predicted time per token (see prediction.py)."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from speccascade_jax.core.samplers import HandOver
from speccascade_jax.planning.prediction import (
    Candidates,
    Chain,
    Plan,
    begins,
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

    For `truncate` and `need` this is the least. What a chain takes to collect r tokens rises with what the
    chain below it takes, so of the chains up to a model only those are kept that no other beats: for
    `truncate`, where one r counts, at some r; for `need`, where every r up to the block size counts, at all r
    together, as where models add to what a text costs. Those may be many; should the search take long, bound
    most_models. For `keep` it is the best end
    of a local search from the `truncate` plans of max_block and every smaller one, and from the best pair.
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
    """`best` for `truncate` and `need`."""
    target, sizes = len(candidates.names) - 1, range(1, max_block + 1)
    rounds = np.stack([renewals(candidates.acceptance, size, max_block) for size in sizes], axis=-2)
    ones, calls = candidates.call_seconds[:, 1], candidates.call_seconds[:, 2:max_block + 2]
    own = candidates.once
    one_r = hand_over == "truncate" and not own[:-1].any()
    # For each drafter: chains that end with it, the seconds [chain, r - 1] they take to collect r tokens, and
    # [chain] their share of what a text costs.
    chains: list[list[Chain]] = [[((i,), ())] for i in range(target)]
    seconds = [ones[i] * np.array([sizes]) for i in range(target)]
    once = [own[i:i + 1] for i in range(target)]
    alone, bounded = list(seconds), most <= target
    # One pass lengthens chains by one model; it may use what it has just found if their length has no bound.
    for _ in range(most - 2 if bounded else 1):
        below, times, shares = (map(list, (chains, seconds, once)) if bounded else (chains, seconds, once))
        for i in range(1, target):
            shorter = [chain for j in range(i) for chain in below[j]]
            every = np.concatenate([alone[i], *(_collect(hand_over, rounds[j, i], calls[i], times[j])
                                                for j in range(i))])
            share = own[i] + np.concatenate([[0.0], *(np.repeat(shares[j], max_block) for j in range(i))])
            kept = np.unique(np.argmin(every, axis=0)) if one_r else _unbeaten(np.c_[every, share])
            seconds[i], once[i] = every[kept], share[kept]
            chains[i] = [_longer(shorter[(k - 1) // max_block], i, (k - 1) % max_block) if k else ((i,), ())
                         for k in kept.tolist()]
    found: Chain = (target,), ()
    least = ones[target] + own[target]
    for j in range(target if most > 1 else 0):
        rounds_per_token = np.array([candidates.rounds(candidates.acceptance[j, target]**np.arange(size + 1))
                                     for size in sizes])
        per_token = (calls[target] + seconds[j]) * rounds_per_token + once[j][:, None] + own[target]
        number, size = divmod(int(np.argmin(per_token)), max_block)
        if per_token[number, size] < least:
            found, least = _longer(chains[j][number], target, size), per_token[number, size]
    return found


def _longer(chain: Chain, model: int, below: int) -> Chain:
    """`chain` with a model that asks it for below + 1 tokens."""
    return (*chain[0], model), (*chain[1], below + 1)


def _collect(hand_over: str, rounds: Float[Array, "S columns"], calls: Float[Array, " S"],
             below: Float[Array, "L R"]) -> Float[Array, "L*S R"]:
    """The seconds in which a model collects r tokens, for each chain below it and each block size."""
    if hand_over == "truncate":
        return (rounds[:, 1:] * (calls[:, None] + below[:, :, None])).reshape(-1, below.shape[1])
    left = np.arange(below.shape[1])  # r - 1
    blocks = np.pad(below, ((0, 0), (1, 0))).T[np.minimum(left + 1, left[:, None]).T]  # of min(s, r - 1)
    every = (rounds[:, 1:] * calls[:, None])[..., None] + begins(rounds) @ blocks
    return np.moveaxis(every, -1, 0).reshape(-1, below.shape[1])


def _unbeaten(seconds: Float[Array, "C R"]) -> Array:
    """The rows of which no other row is as fast at every r."""
    kept, order = [], np.argsort(seconds.sum(axis=1), kind="stable")
    rest = seconds[order]
    while len(order):
        kept.append(order[0])
        beats = np.any(rest < rest[0], axis=1)
        order, rest = order[beats], rest[beats]
    return np.array(kept)


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
