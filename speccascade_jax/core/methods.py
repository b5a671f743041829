"""What a name of --method stands for: a target distribution that is verified, or a separate scheme.

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
    """A number that a method reads beyond alpha: a field of Settings and a flag. It is static: each value
    compiles a program."""

    default: float
    low: float
    high: float
    summary: str  # one sentence for people
    above: bool = False  # `low` is excluded
    kind: type = float  # or int


class Sweep(NamedTuple):
    """Which leniences a sweep tries for a method: tenths, unless others are given."""

    between: tuple[float, ...] = ()  # additional leniences, where tenths would miss a bend
    scale: float = 1.0  # the alpha that a sweep's 1 stands for
    timed: bool = True  # False: its time means nothing


USUAL = Sweep()


@dataclasses.dataclass(frozen=True)
class Method:
    """A target distribution: (scores, alpha) -> (pi, delta), delta None where nothing `defers`."""

    target: Target
    low: float  # alpha's bounds, both included
    high: float
    summary: str  # for people
    defers: bool = True
    lossless: bool = False  # pi = p~, whatever q is
    by_prefix: bool = True  # pi depends on the prefix alone, not on where in a round a position is
    needs_q: bool = True  # pi and delta depend on q; False: on p and the drafted token alone
    trained: bool = False  # a network, read from a file
    knobs: Mapping[str, Knob] = dataclasses.field(default_factory=dict, hash=False, compare=False)
    name: str = ""  # for people
    label: str = ""  # in pictures; "": the name in words
    sweep: Sweep = USUAL

    def tuned(self, **values: float) -> "Method":
        """The method with its knobs at these values; the same object for the same values."""
        return _tuned(self, tuple(values.items())) if values else self


@functools.cache
def _tuned(method: Method, values: tuple[tuple[str, float], ...]) -> Method:
    return dataclasses.replace(method, target=functools.partial(method.target, **dict(values)))


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A way to decode that is not a target distribution of a drafter and a verifier. It makes a sampler from
    all models, the smallest first."""

    sampler: Callable[[Sequence[LanguageModel]], Sampler]
    summary: str  # for people
    high: float = np.inf  # alpha's bounds, both included
    low: float = -np.inf
    models: int | None = None  # how many it is made of; None: any number
    model: int | None = None  # the place of the one that decodes alone, 0 the smallest, -1 the largest
    greedy: bool = False  # decodes only greedily
    confidence: Callable[[np.ndarray], float] | None = None  # from the log probabilities of the drafter's
    # tokens, in [0, 1]: where it is below 1 - alpha the verifier rewrites the text
    name: str = ""  # for people
    label: str = ""  # in pictures; "": the name in words
    sweep: Sweep = USUAL


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The `sampler` of a Scheme that already exists."""

    made: Sampler

    def __call__(self, models: Sequence[LanguageModel]) -> Sampler:
        return self.made
