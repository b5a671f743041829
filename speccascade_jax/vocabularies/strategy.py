"""The declaration of a way to join two vocabularies."""

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
    """The parameters with all columns of the logits."""
    return params, None, False


def no_others(size: int, pairs: Int[np.ndarray, "I 2"]) -> Int[np.ndarray, " N"]:
    """No tokens of the drafter besides the common ones."""
    return np.zeros(0, np.int64)


def follows_all(name: str, method: Method) -> None:
    """Every method can be followed."""


WITHOUT_A_LAW = ", ".join(name for name, method in METHODS.items() if not method.needs_q)
"""The methods that need only p and the drafted token."""


def refused_without_law(
    drafter: str, name: str, method: Method, alternative: str = ""
) -> tuple[str, str] | None:
    """Why a method cannot follow drafts that have no distribution, and the remedy; None if it can."""
    if not method.needs_q:
        return None
    problem = f"{name} needs the drafter's distribution, which {drafter} does not have"
    return problem, f"take {alternative}one of {WITHOUT_A_LAW}."


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A strategy for a drafter of another vocabulary: the laws that it drafts from, and its limits."""

    name: str
    summary: str  # for people
    # (model, params, ids of common tokens) -> params, columns of a tied head, whether these are all columns
    head: Callable[..., tuple[Params, Any, bool]] = whole
    # (drafter's size, pairs) -> its tokens that are put after the verifier's
    others: Callable[..., Int[np.ndarray, " N"]] = no_others
    # (model, target's surfaces, its own, rows of logits, drafter's size) -> TranslatedParams.strings
    tree: Callable[[Any, Sequence[Surface], Sequence[Surface], int, int], Any] | None = None
    # What drafts on the host, between rounds: slem.TextDrafter is an example.
    drafts: Callable[..., Any] | None = None
    # (name, method of the lowest level) -> why it cannot be followed, and the remedy; None where it can
    refusal: Callable[[str, Method], tuple[str, str] | None] = follows_all
    smallest_only: bool = False  # no other model may have another vocabulary
    max_models: int | None = None
    adaptive: bool = True  # its drafts may end where more are not worth their time

    def check(self, name: str, methods: Sequence[Method], scheme: Scheme | None, adaptive: bool) -> None:
        """Raises FieldError for methods, the smallest verifier's first, or a scheme that cannot be
        followed."""
        if scheme is not None and scheme.models is None:
            return  # it decodes by one model, or knows what it does
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
"""Represents a scheme of both models."""
