"""String-level rejection sampling (Timor et al., ICML 2025, arXiv 2502.05202, Algorithm 3)."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from speccascade_jax.core.errors import FieldError
from speccascade_jax.tokenizers.tokenizer import Surface
from speccascade_jax.vocabularies.prefix_tree import strings
from speccascade_jax.vocabularies.strategy import Strategy


def tree(model: Any, target: Sequence[Surface], drafter: Sequence[Surface], rows: int, size: int) -> Any:
    """The texts that the drafter must continue to determine the next target token (see prefix_tree). Raises
    FieldError for a member of a network.
    """
    if not hasattr(model, "extend_branches"):
        raise FieldError(
            "vocabulary",
            "slrs",
            "use vocabulary tli.",
            "slrs is for separate drafters, not for members of a network",
        )
    return jax.tree.map(jnp.asarray, strings(target, drafter, rows, size))


SLRS = Strategy(
    "slrs",
    "a token's chance is that of all texts of the drafter's that begin with it",
    tree=tree,
    smallest_only=True,
)
