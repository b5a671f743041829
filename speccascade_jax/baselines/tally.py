"""The counters of baselines: sums over a row's rounds, from which evaluation.rates computes rates."""

from typing import Any, NamedTuple

import jax
from jaxtyping import Int

Array = jax.Array


class Tally(NamedTuple):
    drafter_passes: Int[Array, " B"]
    rounds: Int[Array, " B"]  # = verifier calls
    drafted: Int[Array, " B"]  # positions for which the drafter was asked to write
    accepted: Int[Array, " B"]  # of them, those that keep its token
    deferred: Int[Array, " B"]  # times the drafter was not trusted
    emitted: Int[Array, " B"]

    def plain(self) -> dict[str, Any]:
        """One row's counts as numbers, by name."""
        return {name: int(value) for name, value in self._asdict().items()}
