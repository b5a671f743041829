"""The base of all models: a Flax network as the decoding core's LanguageModel."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from speccascade_jax.core.protocols import AnyArray
from speccascade_jax.models import cache as caches
from speccascade_jax.models.layers import AfterLayer, Branches, last_written, read_branches

Array = jax.Array


class Keys(nnx.Rngs):
    """The keys of nnx.Rngs(seed).params(), counted outside the trace. nnx counts them in an array; within a
    trace, JAX searches all earlier equations at each update, which took 11 seconds for T5 XL."""

    def __init__(self, seed: int | Array):
        super().__init__()
        self.first = nnx.data(jax.random.key(seed))
        self.count = 0

    def params(self) -> Array:
        self.count += 1
        return jax.random.fold_in(self.first, self.count - 1)


@dataclasses.dataclass(frozen=True)
class FlaxModel:
    """Static and hashable, parameters passed in."""

    config: Any
    dtype: str = "float32"  # of matrix products; int8 if their kernels are packed as int8
    cache_dtype: str = "float32"  # of cached keys and values; CPUs attend faster in float32
    remat: bool = False  # recompute each layer in the backward pass
    stacked: bool = False  # see models/stacking.py

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def network(self, rngs: nnx.Rngs) -> Any:
        raise NotImplementedError

    def graphdef(self) -> nnx.GraphDef:
        return skeleton(self)[0]

    def merged(self, params: nnx.State) -> Any:
        """The network with these parameters."""
        return nnx.merge(self.graphdef(), params)

    def init(self, seed: int) -> nnx.State:
        """Newly initialised parameters."""
        return nnx.split(self.network(Keys(seed)))[1]

    def abstract_params(self) -> nnx.State:
        """The shapes of the parameters, without allocating memory."""
        return jax.tree.map(lambda x: x, skeleton(self)[1])  # a copy, because loading fills it in place


class ForcedModel(FlaxModel):
    """A model that can read a text that is known, by teacher forcing."""

    def forced(
        self,
        params: nnx.State,
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
        after: AfterLayer = last_written,
    ) -> Float[Array, "B T V"]:
        """Teacher forcing: the logits that predict each of `target`. `key` enables dropout, in models that
        have any. `after` is called between the decoder's layers."""
        states = self.forced_states(params, source, source_length, target, key, after)
        return self.head_logits(params, states)

    def forced_states(
        self,
        params: nnx.State,
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
        after: AfterLayer = last_written,
    ) -> Float[Array, "B T D"]:
        """The input of the head in forced(): the last layer's output after the norm."""
        raise NotImplementedError

    def head_logits(self, params: nnx.State, states: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The logits of forced_states()."""
        raise NotImplementedError


class SingleModel(ForcedModel):
    """A model whose cache is a T5Cache or a DecoderCache."""

    def decoder_of(self, params: nnx.State) -> Any:
        """The network that reads such a cache."""
        return self.merged(params)

    def head_logits(self, params: nnx.State, states: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return self.decoder_of(params).logits(states, lambda x: x)

    def roll_back(self, cache: Any, length: Int[AnyArray, " B"]) -> Any:
        return cache._replace(length=jnp.asarray(length))

    def insert(self, cache: Any, fresh: Any, slots: Int[AnyArray, " R"], like_fresh: bool) -> Any:
        return caches.insert(cache, fresh, slots, like_fresh)

    def extend_branches(
        self, params: nnx.State, tokens: Int[AnyArray, " M"], cache: Any, branches: Branches
    ) -> Float[Array, "B M V"]:
        """Float32 logits after each node of a tree of texts; the cache is not changed."""
        return read_branches(self.decoder_of(params), tokens, cache, branches)


@cache
def skeleton(model: FlaxModel) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure of a model's network and the shapes of its parameters. Tracing takes a quarter of a
    second."""
    return nnx.split(nnx.eval_shape(lambda: model.network(Keys(0))))
