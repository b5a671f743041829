"""Strategies for drafters whose vocabulary differs from the verifier's."""

from typing import Literal

from speccascade_jax.vocabularies.slem import SLEM
from speccascade_jax.vocabularies.slrs import SLRS
from speccascade_jax.vocabularies.strategy import Strategy
from speccascade_jax.vocabularies.tli import TLI
from speccascade_jax.vocabularies.union import UNION

VOCABULARIES: dict[str, Strategy] = {"auto": TLI, "tli": TLI, "union": UNION, "slem": SLEM, "slrs": SLRS}
"""The strategies by the names that --vocabulary takes."""
Vocabulary = Literal[tuple(VOCABULARIES)]


def strategy_of(vocabulary: str | Strategy) -> Strategy:
    """The strategy with this name; a Strategy is returned unchanged."""
    return vocabulary if isinstance(vocabulary, Strategy) else VOCABULARIES[vocabulary]
