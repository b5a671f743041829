"""The ways to draft for the smallest verifier, declared once.

DRAFTS lists them, and the first suitable one is used. A new way is one more entry: the sampler that writes
the drafts and, if they need a special verification, the sampler that verifies them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from speccascade_jax.core.protocols import LanguageModel, Sampler
from speccascade_jax.core.samplers.autoregressive import Autoregressive
from speccascade_jax.core.samplers.block import drafting
from speccascade_jax.core.samplers.choosing import Choosing, WithLookup
from speccascade_jax.core.samplers.proposals import Matched


class Drafters(NamedTuple):
    """The available drafters."""

    model: LanguageModel  # the smallest
    block_size: int
    model_free: bool  # drafts of no model are asked for
    beside: Any = None  # those, where `model` drafts, too; None: `model` is none, but makes them


@dataclasses.dataclass(frozen=True)
class DraftKind:
    """A way to draft."""

    suits: Callable[[Drafters], bool]
    sampler: Callable[[Drafters], Sampler]
    # As Speculative, the sampler of the smallest verifier; None: that of the verifiers above it
    verified_by: Callable[..., Sampler] | None = None


DRAFTS: tuple[DraftKind, ...] = (
    DraftKind(  # looked up beside a model, round by round
        lambda drafters: drafters.model_free and drafters.beside is not None,
        lambda drafters: WithLookup(Autoregressive(drafters.model), drafters.beside),
        Choosing,
    ),
    DraftKind(  # proposed without a law
        lambda drafters: drafters.model_free,
        lambda drafters: Autoregressive(drafters.model),
        Matched,
    ),
    DraftKind(  # drawn from a model's laws
        lambda drafters: True,
        lambda drafters: drafting(drafters.model, drafters.block_size),
    ),
)


def kind_of(drafters: Drafters) -> DraftKind:
    """The first suitable entry of DRAFTS."""
    return next(kind for kind in DRAFTS if kind.suits(drafters))
