"""Logits -> the distribution that is sampled: temperature and truncations. Everything here is float32."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Float, Int

Array = jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=["temperature", "top_p", "top_k", "min_p"],
         meta_fields=["max_top_k"])
@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How a distribution is transformed before sampling: temperature, then top-k, top-p and min-p.

    Each is one number for all rows or one for each row [B], and traced: sweeping them compiles once. None
    leaves a truncation, and what it costs, out of the program; a row without it has top_k 0, top_p 1
    or min_p 0. No row's top_k exceeds `max_top_k`, which is static: unless given, the next power of two, or
    the vocabulary's size for a top_k that is traced already.
    """

    temperature: Any = 1.0
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    max_top_k: int | None = None

    def __post_init__(self) -> None:
        if self.max_top_k is None and isinstance(self.top_k, int | np.ndarray | np.integer):
            most = 1 << max(int(np.max(self.top_k)) - 1, 0).bit_length()
            object.__setattr__(self, "max_top_k", most)

    def of_rows(self, rows: int) -> "SamplingOptions":
        """The same with every value [B]. Raises ValueError where one has another shape than [] or [B]."""
        types = {"temperature": jnp.float32, "top_p": jnp.float32, "top_k": jnp.int32, "min_p": jnp.float32}
        values = {}
        for name, dtype in types.items():
            value = getattr(self, name)
            if value is not None and jnp.shape(value) not in ((), (rows,)):
                raise ValueError(f"{name} has shape {jnp.shape(value)}; give one number, or one for each of "
                                 f"the {rows} rows.")
            values[name] = None if value is None else jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))
        return SamplingOptions(**values, max_top_k=self.max_top_k)


def first(mask: Bool[Array, "*B V"]) -> Int[Array, "*B"]:
    """The index of the first true entry, V if there is none (ten times argmax's speed on CPUs)."""
    return jnp.min(jnp.where(mask, jnp.arange(mask.shape[-1], dtype=jnp.int32), mask.shape[-1]), axis=-1)


def token_probs(logits: Float[Array, "*B V"], options: SamplingOptions, at_once: bool = False
                ) -> Float[Array, "*B V"]:
    """softmax(logits / temperature), then top-k, top-p and min-p, renormalised.

    Temperature 0 is the one-hot argmax (the first index on ties). top-k keeps exactly k tokens, top-p the
    smallest set whose mass reaches top_p, the token that crosses it included (Holtzman et al. 2020), min-p
    the tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024); among equals the lower
    id comes first. An option [B] is its row's. TPUs truncate row by row, on the chip, unless `at_once`.
    """
    if logits.ndim > 2 and not (at_once or options.top_p is options.top_k is options.min_p is None):
        return lax.platform_dependent(default=lambda: token_probs(logits, options, True), tpu=lambda: lax.map(
            lambda row: token_probs(*row), (logits, options.of_rows(len(logits)))))

    def of_row(value: Any) -> Array:
        """What broadcasts against the logits, of [] or [B]."""
        return jnp.reshape(value, jnp.shape(value) + (1,) * (logits.ndim - 1) * jnp.ndim(value))

    def ranked() -> Bool[Array, "*B V"]:
        order = lax.top_k(logits, most)[1]
        inside = jnp.broadcast_to(jnp.arange(most) < k, order.shape)
        return jnp.put_along_axis(jnp.zeros(logits.shape, bool), order, inside, axis=-1, inplace=False)

    logits, temperature = logits.astype(jnp.float32), of_row(options.temperature)
    greedy = temperature <= 0
    best = jax.nn.one_hot(first(logits == jnp.max(logits, axis=-1, keepdims=True)), logits.shape[-1])
    logits = logits / jnp.where(greedy, 1.0, temperature)
    if options.top_k is not None:
        most, k = min(options.max_top_k or logits.shape[-1], logits.shape[-1]), of_row(options.top_k)
        inside = lax.platform_dependent(cpu=ranked, default=lambda: largest(jax.nn.softmax(logits), 1, k))
        logits = jnp.where(inside | (k < 1), logits, -jnp.inf)
    probs = jax.nn.softmax(logits, axis=-1)
    if options.top_p is not None:
        top_p = of_row(options.top_p)
        probs = jnp.where(top_p < 1, renormalized(probs, largest(probs, probs, top_p)), probs)
    if options.min_p is not None:
        min_p = of_row(options.min_p)
        likely = probs >= min_p * jnp.max(probs, axis=-1, keepdims=True)
        probs = jnp.where(min_p > 0, renormalized(probs, likely), probs)
    return jnp.where(greedy, best, probs)


def largest(x: Float[Array, "*B V"], weights: Any, enough: Any) -> Bool[Array, "*B V"]:
    """The fewest of the largest x (>= 0), on ties the first, whose weights sum to `enough`. Equal ones have
    equal weights. Nothing is sorted: the bits of the smallest of them are found one by one."""
    def bit(n: Array, edge: Array) -> Array:
        higher = edge | (jnp.uint32(2**31) >> n)
        found = jnp.sum(jnp.where(bits >= higher, weights, 0), axis=-1, keepdims=True)
        return jnp.where(found >= enough, higher, edge)

    bits = lax.bitcast_convert_type(x, jnp.uint32)
    edge = lax.fori_loop(jnp.uint32(0), jnp.uint32(32), bit, jnp.zeros_like(bits[..., :1]))
    above, equal = bits > edge, bits == edge
    before = jnp.sum(jnp.where(above, weights, 0), axis=-1, keepdims=True)
    return above | (equal & (before + (jnp.cumsum(equal, axis=-1) - 1) * weights < enough))


def renormalized(probs: Float[Array, "*B V"], mask: Bool[Array, "*B V"]) -> Float[Array, "*B V"]:
    """`probs` where `mask`, 0 elsewhere, summing to one."""
    probs = jnp.where(mask, probs, 0.0)
    return probs / jnp.sum(probs, axis=-1, keepdims=True)
