"""Block sizes that follow the load: each turn uses the size with the most expected tokens per second.

A larger block yields more tokens per round, if drafts are accepted, but a round takes longer; how much longer
depends on the number of rows in the batch. The seconds of a round are measured for each size when a server
starts, and acceptance is measured on its output.

Changing the size does not change the output distribution. The size is chosen before anything is drafted, from
committed tokens and acceptance counts only, so it is independent of the random numbers of unwritten
positions. The tokens that a sampled row draws do depend on where its rounds begin.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from speccascade_jax.core.samplers.adaptive import ACCEPTANCE

PRIOR = 32.0  # drafted tokens' worth of belief that a position has the acceptance of the one before it
MEMORY = 2000.0  # written tokens after which an observation counts 1/e, because the texts may change
WORTH = 1.03  # a new size must promise this many times the tokens per second of the current one


def sizes_up_to(largest: int) -> tuple[int, ...]:
    """The block sizes to compile: `largest`, its successive halves down to 1, and 0, in ascending order."""
    sizes = [largest]
    while sizes[-1]:
        sizes.append(sizes[-1] // 2)
    return tuple(reversed(sizes))


class Seen(NamedTuple):
    """Each row's counts, and its largest number of drafts per round."""

    histogram: Int[np.ndarray, "B G+1"]  # rounds by number of accepted tokens
    emitted: Int[np.ndarray, " B"]
    limits: Int[np.ndarray, " B"]


@dataclasses.dataclass
class Acceptance:
    """Estimates the probability that the j-th drafted token is accepted, given that those before it are.

    Recent rounds count most. An untested position inherits the value of the position before it, and the first
    starts at ACCEPTANCE. So a server that has stopped drafting tries again once old observations have
    decayed.
    """

    largest: int

    def __post_init__(self) -> None:
        self.kept, self.tested = np.zeros(self.largest), np.zeros(self.largest)
        self.accepted = self.added = 0.0  # drafted tokens that were accepted, and what they added to the text

    def learn(self, seen: Seen) -> None:
        """Adds the rounds of a turn. Tokens drafted after a rejection must not be counted: the random numbers
        of their positions are still to be used."""
        written = seen.emitted.sum()
        at_least = np.cumsum(seen.histogram[:, ::-1], axis=1)[
            :, ::-1
        ]  # rounds with j or more accepted tokens
        inside = np.arange(self.largest) < seen.limits[:, None]
        before = (at_least[:, :-1] * inside).sum(axis=0)
        after = (at_least[:, 1:] * inside).sum(axis=0)
        forgotten = np.exp(-written / MEMORY)
        for name, fresh in {
            "kept": after,
            "tested": before,
            "accepted": after.sum(),
            "added": written - seen.histogram.sum(),
        }.items():
            setattr(self, name, forgotten * getattr(self, name) + fresh)

    def tokens(self) -> Float[np.ndarray, " G+1"]:
        """The expected number of tokens that a round of 0 .. `largest` drafts writes. A round adds slightly
        fewer tokens than it accepts plus one, because nothing follows an accepted end-of-sequence token."""
        rate, standing, chances = ACCEPTANCE, 1.0, list[float]()
        for kept, tested in zip(self.kept, self.tested, strict=True):
            rate = (kept + PRIOR * rate) / (tested + PRIOR)
            standing *= rate
            chances.append(standing)
        share = (self.added + PRIOR) / (self.accepted + PRIOR)
        return 1 + share * np.cumsum([0.0, *chances])


class Blocks:
    """Chooses the block size of each turn of one scheduler."""

    def __init__(self, sizes: Sequence[int]):
        self.sizes = tuple(sizes)
        self.acceptance = Acceptance(max(sizes))
        self.seconds: dict[Any, Mapping[int, float]] = {}  # program -> block size -> seconds of a round
        self.size = max(sizes)

    def choose(self, program: Any, limits: Sequence[int], least: int) -> int:
        """The block size of a program's next turn, at least `least`. `limits` has the most drafts per round
        of each running row."""
        seconds, tokens = self.seconds.get(program, {}), self.acceptance.tokens()
        pace = {
            size: sum(tokens[min(size, limit)] for limit in limits) / seconds[size]
            for size in seconds
            if size >= least
        }
        if pace:
            best = max(pace, key=pace.__getitem__)
            if pace[best] > WORTH * pace.get(self.size, 0.0):
                self.size = best
        else:
            self.size = max(self.sizes)
        return self.size
