"""Declares a strategy to join two vocabularies."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.methods import Method, Scheme
from speccascade_jax.core.protocols import Params
from speccascade_jax.core.rules import METHODS
from speccascade_jax.tokenizers.tokenizer import Surface


def whole(model: Any, params: Params, keep: Int[np.ndarray, " I"]) -> tuple[Params, Any, bool]:
    """Keeps all columns of the logits."""
    return params, None, False


def no_others(size: int, pairs: Int[np.ndarray, "I 2"]) -> Int[np.ndarray, " N"]:
    """Adds no drafter tokens besides the common ones."""
    return np.zeros(0, np.int64)


def follows_all(name: str, method: Method) -> None:
    """Refuses no method."""


WITHOUT_A_LAW = ", ".join(name for name, method in METHODS.items() if not method.needs_q)
"""The methods that need only p and the drafted token."""


def refused_without_law(
    drafter: str, name: str, method: Method, alternative: str = ""
) -> tuple[str, str] | None:
    """Why a method cannot verify drafts without a distribution, and the remedy; None if it can."""
    if not method.needs_q:
        return None
    problem = f"{name} needs the drafter's distribution, which {drafter} does not have"
    return problem, f"take {alternative}one of {WITHOUT_A_LAW}."


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A strategy for a drafter with another vocabulary: the distributions that it drafts from, and its
    limits."""

    name: str
    summary: str  # one sentence for help texts
    # (model, params, ids of common tokens) -> params, columns of a tied head, whether only those columns
    # remain
    head: Callable[..., tuple[Params, Any, bool]] = whole
    # (drafter's size, pairs) -> the drafter's tokens that are appended to the verifier's vocabulary
    others: Callable[..., Int[np.ndarray, " N"]] = no_others
    # (model, target's surfaces, its own, rows of logits, drafter's size) -> TranslatedParams.strings
    tree: Callable[[Any, Sequence[Surface], Sequence[Surface], int, int], Any] | None = None
    # A class that drafts on the host between rounds, such as slem.TextDrafter.
    drafts: Callable[..., Any] | None = None
    # (name, method of the lowest level) -> why it cannot be used, and the remedy; None if it can
    refusal: Callable[[str, Method], tuple[str, str] | None] = follows_all
    smallest_only: bool = False  # no other model may have another vocabulary
    max_models: int | None = None
    adaptive: bool = True  # drafts may end early, at a block size that adapts

    def check(self, name: str, methods: Sequence[Method], scheme: Scheme | None, adaptive: bool) -> None:
        """Raises FieldError for methods (the smallest verifier's first) or a scheme that it cannot be used
        with."""
        if scheme is not None and scheme.models is None:
            return  # it decodes with one model, or makes its own checks
        if adaptive and not self.adaptive:
            raise FieldError(
                "block_size",
                "adaptive",
                "give a number, or use vocabulary tli.",
                f"block_size is 'adaptive', which {self.name}'s drafts are not",
            )
        if refused := self.refusal(name, methods[0] if methods else UNSTATED):
            problem, remedy = refused
            raise FieldError("method", name, remedy, problem)


UNSTATED = Method(lambda scores, alpha: (scores.p, None), 0, 0, "a law that nobody has stated")
"""Represents the unknown method of a scheme that uses both models."""
