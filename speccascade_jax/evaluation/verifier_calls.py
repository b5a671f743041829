"""How many tokens a call of the verifier yields, and how two ways to decode compare on the same texts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from speccascade_jax.evaluation.quality import interval, resamples
from speccascade_jax.inference.text import Cascade
from speccascade_jax.settings import Settings


class Calls(NamedTuple):
    """What a number of texts took, summed over the seeds."""

    tokens: Int[np.ndarray, " texts"]
    calls: Int[np.ndarray, " texts"]

    @property
    def rate(self) -> float:
        """Tokens a call: a ratio of sums."""
        return float(self.tokens.sum() / self.calls.sum())

    def resampled(self) -> Float[np.ndarray, " samples"]:
        """The rate of bootstrap samples of the texts, the same samples for any two with as many texts."""
        drawn = resamples(len(self.tokens))
        return self.tokens[drawn].sum(axis=1) / self.calls[drawn].sum(axis=1)


def calls_of(
    cascade: Cascade, texts: Sequence[str], settings: Settings, seed: int, batch_size: int = 32
) -> Calls:
    """The tokens that each text is decoded to, and its calls of the verifier."""
    outputs = list(cascade.generate(list(texts), settings, seed=seed, batch_size=batch_size, truncate=True))
    return Calls(
        *(np.array([output.counts.get(name, 0) for output in outputs]) for name in ("emitted", "rounds"))
    )


def total(runs: Sequence[Calls]) -> Calls:
    """Of several seeds."""
    return Calls(*(np.sum(column, axis=0) for column in zip(*runs, strict=True)))


def gain(calls: Calls, baseline: Calls) -> tuple[float, float, float]:
    """How many times as many tokens a call as `baseline`'s, and the 95% interval, paired over texts."""
    return calls.rate / baseline.rate, *interval((calls.resampled() / baseline.resampled()).tolist())
