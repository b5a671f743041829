"""The counters of samplers: sums over a row's rounds, from which evaluation.rates computes rates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

Array = jax.Array


class Counters(NamedTuple):
    """The counters of speculative decoding. Tokens beyond the end of the text are neither emitted nor
    accepted."""

    rounds: Int[Array, " B"]  # equals verifier calls
    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]
    deferred: Int[Array, " B"]  # drafted positions at which the rule deferred
    emitted: Int[Array, " B"]
    histogram: Int[Array, "B G+1"]  # rounds by number of accepted tokens

    def plain(self) -> dict[str, Any]:
        """Name -> count of one row, as numbers and lists."""
        return {name: np.asarray(value).tolist() for name, value in self._asdict().items()}

    @classmethod
    def of_round(
        cls,
        active: Bool[Array, " B"],
        drafted: Int[Array, " B"],
        accepted: Int[Array, " B"],
        emitted: Int[Array, " B"],
        deferred: Int[Array, " B"],
        capacity: int,
    ) -> "Counters":
        """The counts of one round; zero for finished rows. No round drafts more than `capacity` tokens."""
        rounds = active.astype(jnp.int32)
        return cls(
            rounds,
            rounds * drafted,
            rounds * accepted,
            rounds * deferred,
            rounds * emitted,
            rounds[:, None] * jax.nn.one_hot(accepted, capacity + 1, dtype=jnp.int32),
        )
