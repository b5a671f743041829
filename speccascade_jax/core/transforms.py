"""Turns logits into the distribution to sample from: temperature, then truncations, all in float32.

TRUNCATIONS declares each truncation once. SamplingOptions, Settings, flags, the HTTP schema, sweeps, tables
and tests derive from it.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Float, Int

from speccascade_jax.core.errors import FieldError, check_range

Array = jax.Array


class Dialect(NamedTuple):
    """Values outside a truncation's range that clients of other servers send; they are read as `meaning`."""

    least: float  # the smallest such value
    below: float  # an upper bound that is not itself one of them
    meaning: Any


@dataclasses.dataclass(frozen=True)
class Truncation:
    """A way to drop unlikely tokens. keep(x, value, bound) is a mask [*B, V] of the tokens that stay.

    x [*B, V] are the model's logits if it reads `logits`, else probabilities; value broadcasts against x.
    Truncations of logits all read the same logits. Truncations of probabilities are applied one after another
    in the order of TRUNCATIONS.
    """

    keep: Callable[[Array, Any, Any], Array]
    low: float
    high: float  # inclusive, like `low` unless `above`
    off: float  # the value that keeps every token
    summary: str  # help text: whole sentences
    sweep: tuple[float, ...]  # values that a sweep tries
    letter: str  # for plots
    kind: type = float
    above: bool = False  # `low` is excluded
    logits: bool = False
    bounded: bool = False  # the largest value of any row is static: keep()'s `bound`
    dialect: Dialect | None = None

    @property
    def dtype(self) -> Any:
        return jnp.int32 if self.kind is int else jnp.float32

    def check(self, name: str, value: Any, vocab_size: float = math.inf) -> None:
        """Raises FieldError for a value out of range; an integer option counts tokens, of `vocab_size`."""
        high = min(self.high, vocab_size) if self.kind is int else self.high
        check_range(name, value, self.low, high, self.above)


def static_bound(values: Iterable[float | None], least: int = 64) -> int | None:
    """A static bound for rows with these values: the next power of two, and at least `least` so that small
    values share a program. None if no row has a value."""
    largest_value = int(max((value or 0 for value in values), default=0))
    return max(1 << (largest_value - 1).bit_length(), least) if largest_value else None


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, init=False)
class SamplingOptions:
    """How a distribution is transformed before sampling: temperature, then the TRUNCATIONS that have a value.

    Each option is one number for all rows or one per row [B]. Options are traced, so that sweeping them
    compiles once. None omits a truncation and its cost from the program; a row without it has the
    truncation's `off`. No row's top_k exceeds `max_top_k`, which is static: by default the next power of two,
    or the vocabulary's size for a top_k that is already traced.
    """

    temperature: Any
    truncations: dict[str, Any]  # name -> value, only for those with a value
    bounds: tuple[tuple[str, int], ...]  # of bounded truncations

    def __init__(self, temperature: Any = 1.0, **values: Any):
        bounds = {
            name: values.pop(f"max_{name}", None)
            for name, truncation in TRUNCATIONS.items()
            if truncation.bounded
        }
        if unknown := values.keys() - TRUNCATIONS.keys():
            raise TypeError(
                f"SamplingOptions has no {min(unknown)!r}; it has temperature, {', '.join(TRUNCATIONS)}."
            )
        truncations = {name: values[name] for name in TRUNCATIONS if values.get(name) is not None}
        for name, bound in bounds.items():
            value = truncations.get(name)
            if bound is None and isinstance(value, int | np.ndarray | np.integer):
                bounds[name] = static_bound([int(np.max(value))], 1)
        self._set(temperature, truncations, tuple((n, bound) for n, bound in bounds.items() if bound))

    def _set(self, *values: Any) -> None:
        for field, value in zip(dataclasses.fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    def __getattr__(self, name: str) -> Any:
        if name in TRUNCATIONS:
            return self.truncations.get(name)
        raise AttributeError(name)

    def tree_flatten_with_keys(self) -> Any:
        keys = jax.tree_util.GetAttrKey("temperature"), jax.tree_util.GetAttrKey("truncations")
        return tuple(zip(keys, (self.temperature, self.truncations), strict=True)), self.bounds

    @classmethod
    def tree_unflatten(cls, bounds: Any, children: Any) -> "SamplingOptions":
        options = object.__new__(cls)
        options._set(*children, bounds)
        return options

    def with_temperature(self, temperature: Any) -> "SamplingOptions":
        return SamplingOptions.tree_unflatten(self.bounds, (temperature, self.truncations))

    def bound(self, name: str) -> int | None:
        return dict(self.bounds).get(name)

    def of_rows(self, rows: int) -> "SamplingOptions":
        """The same options with every value [B]. Raises FieldError for a shape other than [] or [B]."""

        def of_row(name: str, value: Any, dtype: Any) -> Array:
            if jnp.shape(value) not in ((), (rows,)):
                raise FieldError(
                    name,
                    jnp.shape(value),
                    f"give one number, or one for each of the {rows} rows.",
                    f"{name} has shape {jnp.shape(value)}",
                )
            return jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))

        values = {
            name: of_row(name, value, TRUNCATIONS[name].dtype) for name, value in self.truncations.items()
        }
        bounds = {f"max_{name}": bound for name, bound in self.bounds}
        return SamplingOptions(of_row("temperature", self.temperature, jnp.float32), **values, **bounds)


def first(mask: Bool[Array, "*B V"]) -> Int[Array, "*B"]:
    """The index of the first true entry, V if there is none. On CPUs it is ten times as fast as argmax."""
    return jnp.min(jnp.where(mask, jnp.arange(mask.shape[-1], dtype=jnp.int32), mask.shape[-1]), axis=-1)


def token_probs(
    logits: Float[Array, "*B V"], options: SamplingOptions, at_once: bool = False
) -> Float[Array, "*B V"]:
    """softmax(logits / temperature) with the truncations of `options`, renormalised.

    Temperature 0, and any below float32's least normal number, gives the one-hot argmax (the first index on
    ties). An option [B] has one value per row. TPUs truncate row by row, on the chip, unless `at_once`.
    """
    if logits.ndim > 2 and options.truncations and not at_once:
        return lax.platform_dependent(
            default=lambda: token_probs(logits, options, True),
            tpu=lambda: lax.map(lambda row: token_probs(*row), (logits, options.of_rows(len(logits)))),
        )

    def of_row(value: Any) -> Array:
        """A value, [] or [B], reshaped to broadcast against the logits."""
        return jnp.reshape(value, jnp.shape(value) + (1,) * (logits.ndim - 1) * jnp.ndim(value))

    values = {
        name: (truncation, of_row(options.truncations[name]), options.bound(name))
        for name, truncation in TRUNCATIONS.items()
        if name in options.truncations
    }
    logits, temperature = logits.astype(jnp.float32), of_row(options.temperature)
    greedy = temperature < jnp.finfo(jnp.float32).tiny
    highest = jnp.max(logits, axis=-1, keepdims=True)
    best = jax.nn.one_hot(first(logits == highest), logits.shape[-1])
    best = jnp.where(
        jnp.isnan(highest), jnp.nan, best
    )  # otherwise a rule would never defer, which would hide the error
    # Differences from the maximum, so that a tiny temperature only overflows downwards. -inf is kept, because
    # a reciprocal that underflows to 0 would make it NaN.
    scaled = jnp.where(logits == -jnp.inf, -jnp.inf, (logits - highest) / jnp.where(greedy, 1.0, temperature))
    for truncation, value, bound in values.values():
        if truncation.logits:
            kept = truncation.keep(logits, value, bound) | (value == truncation.off)
            scaled = jnp.where(kept, scaled, -jnp.inf)
    weights = jnp.exp(scaled)  # a softmax would look for the largest again, which is 0
    probs = weights / jnp.sum(weights, axis=-1, keepdims=True)
    for truncation, value, bound in values.values():
        if not truncation.logits:
            probs = computed_once(probs)
            inside = renormalized(probs, truncation.keep(probs, value, bound))
            probs = jnp.where(value == truncation.off, probs, inside)
    return jnp.where(greedy, best, probs)


def computed_once(x: Array) -> Array:
    """`x` as an array that XLA computes once for all of its uses.

    XLA may recompute an array in each fusion that reads it, with different rounding. A threshold found in one
    copy can then lie above every entry of another, which leaves a truncation without tokens. This happened on
    an H100, with `opt` and top-p. It was not seen on TPUs, which truncate on the chip, where a barrier would
    double the bytes that they read.
    """
    return lax.platform_dependent(x, tpu=lambda x: x, default=lax.optimization_barrier)


def likeliest(logits: Float[Array, "*B V"], k: Any, bound: int | None) -> Bool[Array, "*B V"]:
    """A mask of exactly the k most likely tokens; on ties, lower ids come first."""
    size = logits.shape[-1]

    def ranked() -> Bool[Array, "*B V"]:
        number = min(bound or size, size)
        order = lax.top_k(logits, number)[1]
        inside = jnp.broadcast_to(jnp.arange(number) < k, order.shape)
        return jnp.put_along_axis(jnp.zeros(logits.shape, bool), order, inside, axis=-1, inplace=False)

    def thresholded() -> Bool[Array, "*B V"]:
        return largest(computed_once(jax.nn.softmax(logits)), 1, k)

    return lax.platform_dependent(cpu=ranked, default=thresholded)


def nucleus(probs: Float[Array, "*B V"], mass: Any, bound: None) -> Bool[Array, "*B V"]:
    """The smallest set whose mass reaches `mass`, including the token that crosses it (Holtzman et al.
    2020)."""
    mass = jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)
    return lax.platform_dependent(
        cpu=lambda: _nucleus_of_few(probs, mass), default=lambda: largest(probs, probs, mass)
    )


FEW = 64
"""The size of a nucleus that CPUs find by the largest probabilities alone."""


def _nucleus_of_few(probs: Float[Array, "*B V"], mass: Any) -> Bool[Array, "*B V"]:
    """nucleus() by the FEW largest probabilities, which CPUs find sooner than the mask of largest(). A
    distribution that needs more tokens falls back to it; a mass of 1 keeps all."""
    values, order = lax.top_k(probs, min(FEW, probs.shape[-1]))
    through = jnp.cumsum(values, axis=-1)
    count = 1 + jnp.sum(through[..., :-1] < mass, axis=-1, keepdims=True)
    lowest, last = (jnp.take_along_axis(x, count - 1, axis=-1) for x in (values, order))
    place = jnp.arange(probs.shape[-1])
    mask = (probs > lowest) | ((probs == lowest) & (place <= last)) | (mass >= 1)
    if probs.shape[-1] <= FEW:
        return mask
    known = (through[..., -1:] >= mass) | (mass >= 1)
    return lax.cond(jnp.all(known), lambda: mask, lambda: jnp.where(known, mask, largest(probs, probs, mass)))


def likely(probs: Float[Array, "*B V"], share: Any, bound: None) -> Bool[Array, "*B V"]:
    """The tokens at least `share` times as likely as the most likely one (Nguyen et al. 2024)."""
    return probs >= share * jnp.max(probs, axis=-1, keepdims=True)


def largest(x: Float[Array, "*B V"], weights: Any, enough: Any) -> Bool[Array, "*B V"]:
    """A mask of the smallest number of largest x (>= 0) whose weights sum to `enough`; on ties, the first
    ones. Equal x have equal weights. It does not sort: the bits of the smallest x in the mask are determined
    one at a time."""

    def bit(n: Array, edge: Array) -> Array:
        higher = edge | (jnp.uint32(2**31) >> n)
        total = jnp.sum(jnp.where(bits >= higher, weights, 0), axis=-1, keepdims=True)
        return jnp.where(total >= enough, higher, edge)

    bits = lax.bitcast_convert_type(x, jnp.uint32)
    edge = lax.fori_loop(jnp.uint32(0), jnp.uint32(32), bit, jnp.zeros_like(bits[..., :1]))
    above, equal = bits > edge, bits == edge
    before = jnp.sum(jnp.where(above, weights, 0), axis=-1, keepdims=True)
    return above | (equal & (before + (jnp.cumsum(equal, axis=-1) - 1) * weights < enough))


def renormalized(probs: Float[Array, "*B V"], mask: Bool[Array, "*B V"]) -> Float[Array, "*B V"]:
    """`probs` where `mask` is true and 0 elsewhere, rescaled to sum to one."""
    probs = jnp.where(mask, probs, 0.0)
    return probs / jnp.sum(probs, axis=-1, keepdims=True)


def within_sigmas(logits: Float[Array, "*B V"], number: Any, bound: None) -> Bool[Array, "*B V"]:
    """The tokens whose logits are at most `number` standard deviations (of all logits) below the largest, at
    any temperature (Tang et al. 2024, arXiv 2411.07641). Logits of -inf are ignored."""
    written = logits > -jnp.inf
    highest = jnp.max(logits, axis=-1, keepdims=True)
    sigma = jnp.std(logits, axis=-1, keepdims=True, where=written)
    return written & (logits >= highest - number * sigma)


TRUNCATIONS: dict[str, Truncation] = {
    "top_k": Truncation(
        likeliest,
        1,
        2**31 - 1,
        off=0,
        summary="Sample only among the k most likely tokens. None keeps all tokens.",
        sweep=(16, 4, 2),
        letter="k",
        kind=int,
        logits=True,
        bounded=True,
        dialect=Dialect(-1, 1, None),
    ),
    "top_p": Truncation(
        nucleus,
        0.0,
        1.0,
        off=1.0,
        above=True,
        sweep=(0.9, 0.7, 0.5, 0.3),
        letter="p",
        summary="Sample only among the fewest most likely tokens whose total probability reaches this value. "
        "None keeps all tokens.",
        dialect=Dialect(0, 1e-9, 1e-9),
    ),
    "min_p": Truncation(
        likely,
        0.0,
        1.0,
        off=0.0,
        sweep=(0.05, 0.15, 0.4),
        letter="m",
        summary="Sample only among tokens whose probability is at least this fraction of the largest one. "
        "None keeps all tokens.",
    ),
    "top_n_sigma": Truncation(
        within_sigmas,
        0.0,
        math.inf,
        off=math.inf,
        above=True,
        sweep=(2.0, 1.0, 0.5),
        letter="n",
        logits=True,
        summary="Sample only among tokens whose logits are at most this many standard deviations below the "
        "largest one. None keeps all tokens.",
    ),
}
"""The truncations by the names that Settings, flags and requests use."""


SamplingOptions.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter("temperature", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=1.0),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in TRUNCATIONS),
    ]
)
