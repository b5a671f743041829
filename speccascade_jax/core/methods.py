"""The types behind the names of --method: a target distribution for verification, or a separate scheme.

For example:

    METHODS["token_v3"].target(scores, 0.2)    # rules.py: pi [B, T, V] and delta [B, T, V]
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from speccascade_jax.core.protocols import LanguageModel, Sampler

Array = jax.Array
Target = Callable[..., tuple[Array, Array | None]]
"""(scores, alpha) -> (pi, delta); with knobs, target(scores, alpha, **values)."""


@dataclasses.dataclass(frozen=True)
class Knob:
    """A number that a method reads in addition to alpha: a field of Settings and a flag. It is static, so
    that each value compiles a program."""

    default: float
    low: float
    high: float
    summary: str  # help text: whole sentences
    above: bool = False  # `low` is excluded
    kind: type = float  # or int


class Sweep(NamedTuple):
    """The leniences that a sweep tries for a method: tenths, plus those of `between`."""

    between: tuple[float, ...] = ()  # additional leniences, for steps finer than tenths
    scale: float = 1.0  # the alpha that a sweep's 1 stands for
    timed: bool = True  # False: its time is meaningless


USUAL = Sweep()


@dataclasses.dataclass(frozen=True)
class Method:
    """A target distribution: (scores, alpha) -> (pi, delta); delta is None if the method does not `defer`."""

    target: Target
    low: float  # alpha's bounds, both included
    high: float
    summary: str  # for help texts
    defers: bool = True
    lossless: bool = False  # pi = p~ for every q
    by_prefix: bool = True  # pi depends only on the prefix, not on the position in a round
    needs_q: bool = True  # pi and delta depend on q; False: only on p and the drafted token
    trained: bool = False  # contains a network that is read from a file
    knobs: Mapping[str, Knob] = dataclasses.field(default_factory=dict, hash=False, compare=False)
    name: str = ""  # shown in messages
    label: str = ""  # in plots; "": derived from the name
    sweep: Sweep = USUAL

    def tuned(self, **values: float) -> "Method":
        """The method with its knobs set to these values; the same values return the same object."""
        return _tuned(self, tuple(values.items())) if values else self


@functools.cache
def _tuned(method: Method, values: tuple[tuple[str, float], ...]) -> Method:
    return dataclasses.replace(method, target=functools.partial(method.target, **dict(values)))


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A way to decode that is not a target distribution of a drafter and a verifier. It makes a sampler from
    all models, smallest first."""

    sampler: Callable[[Sequence[LanguageModel]], Sampler]
    summary: str  # for help texts
    high: float = np.inf  # alpha's bounds, both included
    low: float = -np.inf
    models: int | None = None  # required number of models; None: any
    model: int | None = None  # index of the model that decodes alone: 0 is the smallest, -1 the largest
    greedy: bool = False  # decodes only greedily
    verifications: tuple[str, ...] | None = None  # those that it offers; None: those of the sampler it makes
    confidence: Callable[[np.ndarray], float] | None = None  # in [0, 1], from the log probabilities of the
    # drafter's tokens: if it is below 1 - alpha, the verifier decodes the text again
    name: str = ""  # shown in messages
    label: str = ""  # in plots; "": derived from the name
    sweep: Sweep = USUAL


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A Scheme's `sampler` function that returns an existing sampler."""

    made: Sampler

    def __call__(self, models: Sequence[LanguageModel]) -> Sampler:
        return self.made
