"""The union of both vocabularies (Timor et al., ICML 2025, arXiv 2502.05202, Algorithm 1)."""

import numpy as np
from jaxtyping import Int

from speccascade_jax.core.methods import Method
from speccascade_jax.vocabularies.strategy import Strategy


def drafter_only(size: int, pairs: Int[np.ndarray, "I 2"]) -> Int[np.ndarray, " N"]:
    """The drafter's tokens that the verifier lacks."""
    return np.setdiff1d(np.arange(size), pairs[:, 0])


def refusal(name: str, method: Method) -> tuple[str, str] | None:
    """Refuses lossy methods, which may give mass to tokens that only the drafter has."""
    return (
        None
        if method.lossless
        else (
            f"{name} would write tokens that only the drafter has",
            "use vocabulary tli, or speculative at the lowest level.",
        )
    )


UNION = Strategy(
    "union",
    "the drafter writes all of its tokens, and the verifier refuses those it has not",
    others=drafter_only,
    refusal=refusal,
    smallest_only=True,
)
