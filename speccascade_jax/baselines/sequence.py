"""The sequence cascade: the drafter writes a text, and if its confidence is low, the verifier writes another.

It consists of two decodings, of which the second has only the deferred rows. inference.text runs both.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from speccascade_jax.core.protocols import Block, Cache, Counts, Params, Rows
from speccascade_jax.core.samplers import Autoregressive

Array = jax.Array
QUANTILE = 0.4  # the quantile of token log-probabilities in sequence_quantile


class Trace(NamedTuple):
    """The counts of Scored; L is the length of the token buffer."""

    passes: Int[Array, " B"]
    log_q: Float[Array, "B L"]  # of the token drawn at each position; 0 if none was
    drawn: Int[Array, "B L"]  # 1 at these positions


@dataclasses.dataclass(frozen=True)
class Scored:
    """A drafter that records the probability of each token: the first half of a sequence cascade."""

    drafter: Autoregressive
    width: int = dataclasses.field(default=1, init=False)
    level: int = dataclasses.field(default=0, init=False)
    overhang: int = dataclasses.field(default=0, init=False)

    @property
    def models(self) -> Any:
        return self.drafter.models

    def plain(self, counts: Trace) -> dict[str, Any]:
        return {"log_q": counts.log_q[counts.drawn > 0].tolist()}

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        block, caches, size = self.drafter.step(params, caches, rows, eos_id)
        here = (jnp.arange(rows.noise.length) == rows.start[:, None]) & (size > 0)[:, None]
        log_q = jnp.log(jnp.take_along_axis(block.untransformed[:, 0], block.tokens, axis=1))
        return block, caches, Trace(size, jnp.where(here, log_q, 0.0), here.astype(jnp.int32))


def probability(log_q: np.ndarray) -> float:
    """The probability of a text (Chow), from the log probabilities of its tokens."""
    return float(np.exp(np.sum(log_q)))


def mean_probability(log_q: np.ndarray) -> float:
    """The geometric mean of the tokens' probabilities, which is normalised by length."""
    return float(np.exp(np.mean(log_q)))


def quantile(log_q: np.ndarray) -> float:
    """The quantile at QUANTILE of the tokens' probabilities (Gupta et al. 2024)."""
    return float(np.exp(np.quantile(log_q, QUANTILE)))
