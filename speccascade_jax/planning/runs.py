"""The numbers of accepted tokens in drafts, computed on existing texts, without drafting.

Given a text x from the verifier's distribution pi, if a round begins at position s, the probability that its
drafted tokens 1 .. j are accepted and equal those of the text follows from the ratios q~/pi of the text's
tokens (core.verification.Verification.standing). So the rounds are a Markov chain over the text's positions,
and their expected number is exact for every block size and verification.
"""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from speccascade_jax.core.verification import Verification


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """The accepted tokens of a model's drafts on texts of the model that verifies them."""

    stands: Float[np.ndarray, "S T L N+1"]
    """[n - 1, t, s, j]: the probability that the first j tokens of a draft of n are accepted, if a round
    begins after s tokens of text t. Tokens after the text's end count as accepted. S is N, or 1 if the
    distributions of a draft's tokens do not depend on its length."""
    lengths: Int[np.ndarray, " T"]

    @classmethod
    def of(
        cls,
        ratios: Float[np.ndarray, "T L"],
        lengths: Int[np.ndarray, " T"],
        verification: Verification,
        longest: int,
    ) -> "Runs":
        """Computes runs from the ratios q~/pi of each text's tokens, for drafts of up to `longest` tokens."""
        inside = np.arange(ratios.shape[1]) < lengths[:, None]
        return cls.of_drafts(windows(np.where(inside, ratios, 1.0), longest)[None], lengths, verification)

    @classmethod
    def of_drafts(
        cls,
        ratios: Float[np.ndarray, "S T L N"],
        lengths: Int[np.ndarray, " T"],
        verification: Verification,
    ) -> "Runs":
        """Computes runs from the ratios q~/pi of the tokens after each position, in a draft that begins
        there. Indices are those of `stands`, and the ratio is 1 past a text's end."""
        return cls(verification.standing(ratios), lengths)

    def of_size(self, size: int) -> Float[np.ndarray, "T L size+1"]:
        """`stands` for drafts of `size` tokens."""
        return self.stands[min(size, len(self.stands)) - 1, ..., : size + 1]

    def calls(self, at_least: Float[np.ndarray, " n"]) -> Float[np.ndarray, " T"]:
        """The expected number of verifier calls for each text, if a draft has at least x tokens with
        probability at_least[x]."""
        size = len(at_least)
        law = chances(self.of_size(size - 1) * at_least)
        texts, length = law.shape[:2]
        begins = np.zeros((texts, length + size + 1))  # [t, s]: the probability that a round begins there
        begins[:, 0] = 1.0
        for s in range(length):
            begins[:, s : s + size + 1] += begins[:, s, None] * law[:, s]
        inside = np.arange(length) < self.lengths[:, None]
        return np.sum(begins[:, :length] * inside, axis=1)

    def calls_per_token(self, at_least: Float[np.ndarray, " n"]) -> float:
        return float(self.calls(at_least).sum() / self.lengths.sum())

    def survival(self, size: int) -> Float[np.ndarray, " size+1"]:
        """The probability that the first j tokens of a draft of `size` are accepted, over all positions of
        all texts. Each step uses the positions with at least j tokens after them, as in the Kaplan-Meier
        estimator."""
        stands = self.of_size(size)
        left = self.lengths[:, None] - np.arange(stands.shape[1])
        share, chance = 1.0, [1.0]
        for j in range(1, size + 1):
            among = stands[left >= j]
            if among.size and (before := among[:, j - 1].sum()) > 0:
                share = float(among[:, j].sum() / before)
            chance.append(chance[-1] * share)
        return np.array(chance)


def windows(values: Float[np.ndarray, "T L"], size: int) -> Float[np.ndarray, "T L size"]:
    """[t, s]: the `size` values of row t that start at s; values past the row's end are 1."""
    padded = np.pad(values, ((0, 0), (0, size)), constant_values=1.0)
    return np.lib.stride_tricks.sliding_window_view(padded, size, axis=1)[:, :-1]


def chances(survives: Float[np.ndarray, "*A L"]) -> Float[np.ndarray, "*A L+1"]:
    """P(X = x) for x = 0 .. L from P(X > x)."""
    return -np.diff(survives, axis=-1, prepend=1.0, append=0.0)
