"""The baselines that run differently: token, oracle and sequence cascades, and BiLD.

They write texts and draft for nobody, for the verifier does not read the last tokens of a text.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from speccascade_jax.baselines.bild import Bild
from speccascade_jax.baselines.drafting import CAP
from speccascade_jax.baselines.oracle import Oracle
from speccascade_jax.baselines.sequence import QUANTILE, Scored
from speccascade_jax.baselines.token_cascade import TokenCascade
from speccascade_jax.core.protocols import LanguageModel, Sampler
from speccascade_jax.core.samplers import Autoregressive


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A sampler of (drafter, verifier), the range of its alpha, and a summary for people."""

    sampler: Callable[[LanguageModel, LanguageModel], Sampler]
    high: float
    summary: str
    greedy: bool = False  # decodes only greedily
    low: float = 0


def _scored(drafter: LanguageModel, verifier: Any) -> Sampler:
    return Scored(Autoregressive(drafter))


BASELINES: dict[str, Baseline] = {
    "sequence": Baseline(_scored, 1, "the drafter's text, the verifier's where its probability < 1 - alpha"),
    "sequence_mean": Baseline(_scored, 1, "as sequence, of the tokens' mean probability (geometric)"),
    "sequence_quantile": Baseline(_scored, 1, f"as sequence, of the quantile at {QUANTILE} of the tokens'"),
    "token_cascade": Baseline(lambda q, p: TokenCascade(Autoregressive(q), p), 1,
                              f"drafter until max q < 1 - alpha or {CAP} tokens, then one of the verifier's"),
    "oracle": Baseline(Oracle, 1, "diff with both models at every token: for its quality, not its time"),
    "bild": Baseline(lambda q, p: Bild(Autoregressive(q), p), np.inf,
                     "greedy: drafter until max q < 0.6; back to the first token with -log p > alpha", True),
    "bild_compat": Baseline(lambda q, p: Bild(Autoregressive(q), p, compat=True), np.inf,
                            "as bild, with the deviations of its released code", True),
}
