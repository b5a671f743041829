"""The baselines that run differently: token, oracle and sequence cascades, and BiLD.

They write texts and cannot draft, because the verifier does not read the last tokens of a text.
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

PAIR: dict[str, Any] = {"models": 2, "low": 0}


def _pair(
    kind: Callable[..., Sampler], *, drafts: bool = True, **fields: Any
) -> Callable[[Sequence[LanguageModel]], Sampler]:
    """A Scheme's `sampler`: kind(drafter, verifier), the drafter as a sampler where it `drafts`."""

    def sampler(models: Sequence[LanguageModel]) -> Sampler:
        drafter, verifier = models
        return kind(Autoregressive(drafter) if drafts else drafter, verifier, **fields)

    return sampler


def _sequence(summary: str, confidence: Callable[[np.ndarray], float]) -> Scheme:
    return Scheme(lambda models: Scored(Autoregressive(models[0])), summary, 1, confidence=confidence, **PAIR)


BASELINES: dict[str, Scheme] = {
    "sequence": _sequence(
        "the drafter's text, the verifier's where its probability < 1 - alpha", probability
    ),
    "sequence_mean": _sequence("as sequence, of the tokens' mean probability (geometric)", mean_probability),
    "sequence_quantile": _sequence(f"as sequence, of the quantile at {QUANTILE} of the tokens'", quantile),
    "token_cascade": Scheme(
        _pair(TokenCascade),
        f"drafter until max q < 1 - alpha or {CAP} tokens, then one of the verifier's",
        1,
        **PAIR,
    ),
    "oracle": Scheme(
        _pair(Oracle, drafts=False),
        "diff with both models at every token: for its quality, not its time",
        1,
        sweep=Sweep(timed=False),
        **PAIR,
    ),
    "bild": Scheme(
        _pair(Bild),
        "greedy: drafter until max q < 0.6; back to the first token with -log p > alpha",
        greedy=True,
        label="BiLD",
        sweep=Sweep(scale=10.0),
        **PAIR,
    ),
    "bild_compat": Scheme(
        _pair(Bild, compat=True),
        "as bild, with the deviations of its released code",
        greedy=True,
        label="BiLD (as released)",
        sweep=Sweep(scale=10.0),
        **PAIR,
    ),
}
BASELINES = {name: dataclasses.replace(scheme, name=name) for name, scheme in BASELINES.items()}
