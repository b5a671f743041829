"""The counters of baselines: sums over a row's rounds, from which evaluation.rates computes rates."""

from typing import Any, NamedTuple

import jax
from jaxtyping import Int

Array = jax.Array


class Tally(NamedTuple):
    drafter_passes: Int[Array, " B"]
    rounds: Int[Array, " B"]  # equals verifier calls
    drafted: Int[Array, " B"]  # positions at which the drafter was asked for a token
    accepted: Int[Array, " B"]  # those at which its token was kept
    deferred: Int[Array, " B"]  # deferrals to the verifier
    emitted: Int[Array, " B"]

    def plain(self) -> dict[str, Any]:
        """Name -> count of one row."""
        return {name: int(value) for name, value in self._asdict().items()}
