"""Baselines with decoding loops of their own: token, oracle and sequence cascades, and BiLD.

They cannot draft for another verifier, because their verifier does not read the last tokens of a text.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from speccascade_jax.baselines.bild import Bild
from speccascade_jax.baselines.drafting import CAP
from speccascade_jax.baselines.oracle import Oracle
from speccascade_jax.baselines.sequence import QUANTILE, Scored, mean_probability, probability, quantile
from speccascade_jax.baselines.token_cascade import TokenCascade
from speccascade_jax.core.methods import Scheme, Sweep
from speccascade_jax.core.protocols import LanguageModel, Sampler
from speccascade_jax.core.samplers import Autoregressive

PAIR: dict[str, Any] = {"models": 2, "low": 0, "verifications": ()}


def _pair(
    kind: Callable[..., Sampler], *, drafts: bool = True, **fields: Any
) -> Callable[[Sequence[LanguageModel]], Sampler]:
    """A Scheme's `sampler`: kind(drafter, verifier), with the drafter as a sampler if `drafts`."""

    def sampler(models: Sequence[LanguageModel]) -> Sampler:
        drafter, verifier = models
        return kind(Autoregressive(drafter) if drafts else drafter, verifier, **fields)

    return sampler


def _sequence(summary: str, confidence: Callable[[np.ndarray], float]) -> Scheme:
    return Scheme(lambda models: Scored(Autoregressive(models[0])), summary, 1, confidence=confidence, **PAIR)


BASELINES: dict[str, Scheme] = {
    "sequence": _sequence(
        "the drafter's text, or the verifier's if the probability of the former < 1 - alpha", probability
    ),
    "sequence_mean": _sequence(
        "sequence, by the geometric mean of the tokens' probabilities", mean_probability
    ),
    "sequence_quantile": _sequence(
        f"sequence, by the {QUANTILE} quantile of the tokens' probabilities", quantile
    ),
    "token_cascade": Scheme(
        _pair(TokenCascade),
        f"the drafter until max q < 1 - alpha, {CAP} tokens at most, then one verifier token",
        1,
        **PAIR,
    ),
    "oracle": Scheme(
        _pair(Oracle, drafts=False),
        "diff with both models at every token, to measure its quality (its time means nothing)",
        1,
        sweep=Sweep(timed=False),
        **PAIR,
    ),
    "bild": Scheme(
        _pair(Bild),
        "greedy: the drafter until max q < 0.6; roll back to the first token with -log p > alpha",
        greedy=True,
        label="BiLD",
        sweep=Sweep(scale=10.0),
        **PAIR,
    ),
    "bild_compat": Scheme(
        _pair(Bild, compat=True),
        "bild, as in its released code",
        greedy=True,
        label="BiLD (as released)",
        sweep=Sweep(scale=10.0),
        **PAIR,
    ),
}
BASELINES = {name: dataclasses.replace(scheme, name=name) for name, scheme in BASELINES.items()}
