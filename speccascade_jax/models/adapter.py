"""Adapters that turn any function from tokens to logits into a LanguageModel: a Flax NNX or Linen model, or
plain JAX.

The function has no cache, so every call reads the whole text again, which suits small models and experiments.
A model for production should implement the methods of core.protocols.LanguageModel itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from speccascade_jax.core.protocols import AnyArray, Params, Prefix

Array = jax.Array


class TextCache(NamedTuple):
    """The text itself; entries at or past `length` are scratch."""

    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class AdaptedModel:
    """apply(params, tokens [B, T]) -> logits [B, T, V], as a LanguageModel that continues its prompt.

    `apply` must be hashable and causal: logits at a position depend only on the tokens up to it. It is called
    with texts that are padded at the end.
    """

    apply: Callable[[Params, Array], Array]
    vocab_size: int

    def prefill(
        self, params: Params, inputs: Int[AnyArray, "B S"], input_length: Int[AnyArray, " B"], max_length: int
    ) -> tuple[Prefix, TextCache]:
        inputs, input_length = jnp.asarray(inputs), jnp.asarray(input_length)
        tokens = jnp.pad(inputs, ((0, 0), (0, max(max_length - inputs.shape[1], 0))))[:, :max_length]
        return Prefix(inputs, input_length), TextCache(tokens, jnp.maximum(input_length - 1, 0))

    def extend(
        self, params: Params, tokens: Int[AnyArray, "B T"], cache: TextCache
    ) -> tuple[Float[Array, "B T V"], TextCache]:
        place = cache.length[:, None] + jnp.arange(tokens.shape[1])
        rows = jnp.arange(len(tokens))[:, None]
        text = cache.tokens.at[rows, place].set(tokens, mode="drop")
        logits = self.apply(params, text)
        chosen = jnp.take_along_axis(logits, place[..., None], axis=1, mode="clip")
        return chosen.astype(jnp.float32), TextCache(text, cache.length + tokens.shape[1])

    def roll_back(self, cache: TextCache, length: Int[AnyArray, " B"]) -> TextCache:
        return cache._replace(length=jnp.asarray(length))


@dataclasses.dataclass(frozen=True)
class Merged:
    """An NNX module, called with its state."""

    graphdef: nnx.GraphDef

    def __call__(self, params: Params, tokens: Array) -> Array:
        return nnx.merge(self.graphdef, params)(tokens)


@dataclasses.dataclass(frozen=True)
class Applied:
    """A Linen module, called with its variables."""

    module: Any

    def __call__(self, params: Params, tokens: Array) -> Array:
        return self.module.apply(params, tokens)


def from_nnx(module: nnx.Module, vocab_size: int) -> tuple[AdaptedModel, Params]:
    """Turns a Flax NNX module, tokens -> logits, into a LanguageModel and its parameters. Call module.eval()
    first if it has dropout."""
    graphdef, state = nnx.split(module)
    return AdaptedModel(Merged(graphdef), vocab_size), state


def from_linen(module: Any, variables: Params, vocab_size: int) -> tuple[AdaptedModel, Params]:
    """Turns a Flax Linen module, tokens -> logits, into a LanguageModel and its parameters."""
    return AdaptedModel(Applied(module), vocab_size), variables
