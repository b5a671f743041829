"""Block sizes that follow the load: rounds have the size from which most tokens per second are expected.

A larger block yields more tokens per round, as far as drafts are accepted, and takes longer; how much longer
depends on how many rows the devices compute at once. Both are measured: the seconds of a round of each size
when a server starts, the acceptance on what it writes.

That is exact. The size is chosen before anything is drafted, from committed tokens and from how many drafted
ones were accepted, and no random number of a position that is still to be written has a part in that. So each
row follows its law, whatever the sizes. Which tokens a sampled row draws does depend on where its rounds
begin.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from speccascade_jax.core.samplers.adaptive import ACCEPTANCE

PRIOR = 32.0  # drafted tokens by which the acceptance before a position is believed to be its own, too
MEMORY = 2000.0  # written tokens after which what was seen counts for 1/e: another kind of texts may come
WORTH = 1.03  # how many times as many tokens per second make another size than the last worth its while


def sizes_up_to(largest: int) -> tuple[int, ...]:
    """The block sizes that are compiled: `largest`, and half of each down to 1 and 0, ascending."""
    sizes = [largest]
    while sizes[-1]:
        sizes.append(sizes[-1] // 2)
    return tuple(reversed(sizes))


class Seen(NamedTuple):
    """The counts of rows in their rounds, and the largest number of drafts per round of each row."""

    histogram: Int[np.ndarray, "B G+1"]  # rounds by number of accepted tokens
    emitted: Int[np.ndarray, " B"]
    limits: Int[np.ndarray, " B"]


@dataclasses.dataclass
class Acceptance:
    """The recent probability that the j-th drafted token of a round is accepted, given that those before it
    are.

    An untested position has the value of the position before it, and the first one has ACCEPTANCE. So a
    server that has stopped drafting tries again once old observations are forgotten.
    """

    largest: int

    def __post_init__(self) -> None:
        self.kept, self.tested = np.zeros(self.largest), np.zeros(self.largest)
        self.accepted = self.added = 0.0  # drafted tokens that were accepted, and what they added to the text

    def learn(self, seen: Seen) -> None:
        """Counts the rounds of a turn. What was drafted after a rejection is unknown here, as it has to be:
        it met random numbers that are still to be used."""
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
        """The tokens that a round of 0 .. `largest` drafts is expected to write. An accepted token that ends
        its text has no other one after it: what a draft adds is a little less than what is accepted."""
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
        self.seconds: dict[Any, Mapping[int, float]] = {}  # by program: of a round of each size
        self.size = max(sizes)

    def choose(self, program: Any, limits: Sequence[int], least: int) -> int:
        """The size of the next turn of a `program`, at least `least`. `limits` are the most drafts of each
        running row's rounds."""
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
