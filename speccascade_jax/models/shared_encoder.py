"""A drafter that reads its verifier's encoder: a small T5 decoder whose cross-attention sees a projection of
what the verifier has encoded, so that a source is encoded once for both.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int
from tyro.conf import Suppress

from speccascade_jax.core.typing import AnyArray, Prefix
from speccascade_jax.models.cache import T5Cache
from speccascade_jax.models.layers import AfterLayer, Linear, last_written, make_dropout, skeleton
from speccascade_jax.models.members import Member, beneath, members
from speccascade_jax.models.t5 import T5, T5Config, T5Model, padding_bias

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class SharedEncoderConfig:
    """A verifier, and a drafter without an encoder, whose fields are no flags of a run's command line."""

    family: ClassVar[str] = "shared_encoder"
    full_part: ClassVar[str] = "verifier"  # where the full model's parameters are
    verifier: T5Config = dataclasses.field(default_factory=T5Config)
    drafter: Suppress[T5Config] = dataclasses.field(default_factory=lambda: T5Config(
        d_model=256, d_ff=512, num_heads=4, num_encoder_layers=0, num_decoder_layers=1))

    @property
    def full(self) -> T5Config:
        return self.verifier

    @property
    def vocab_size(self) -> int:
        return self.verifier.vocab_size

    @property
    def pad_id(self) -> int:
        return self.verifier.pad_id

    @property
    def eos_id(self) -> int:
        return self.verifier.eos_id


class SharedEncoderCache(NamedTuple):
    """What the two decoders remember."""

    drafter: T5Cache
    verifier: T5Cache

    @property
    def length(self) -> Int[Array, " B"]:
        """The longer one's."""
        return jnp.maximum(self.drafter.length, self.verifier.length)


class SharedEncoder(nnx.Module):
    """The verifier's network, the drafter's, and what the drafter sees of the verifier's encoder."""

    def __init__(self, config: SharedEncoderConfig, *, dtype: Any, remat: bool, rngs: nnx.Rngs):
        self.verifier = T5(config.verifier, dtype=dtype, remat=remat, rngs=rngs)
        self.drafter = T5(config.drafter, dtype=dtype, remat=remat, rngs=rngs)
        width = config.verifier.d_model
        self.projection = Linear(width, config.drafter.d_model, std=width**-0.5, dtype=dtype, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class SharedEncoderModel:
    """A network of two members, "drafter" and "verifier". Used by itself it is the verifier."""

    config: SharedEncoderConfig
    dtype: str = "float32"        # of the matrix products; int8 where their kernels are packed so
    cache_dtype: str = "float32"  # of remembered keys and values
    remat: bool = False           # recompute each layer in the backward pass
    names: ClassVar[tuple[str, ...]] = ("drafter", "verifier")

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def full(self) -> T5Model:
        """The verifier without the drafter."""
        return T5Model(self.config.verifier, self.dtype, self.cache_dtype, self.remat)

    @property
    def members(self) -> tuple[Member, ...]:
        return members(self)

    def missing(self, name: str) -> str:
        return f"holds a drafter and a verifier, no {name!r}: write @drafter or @verifier"

    def network(self, rngs: nnx.Rngs) -> SharedEncoder:
        return SharedEncoder(self.config, dtype=jnp.dtype(self.dtype), remat=self.remat, rngs=rngs)

    def graphdef(self) -> nnx.GraphDef:
        return skeleton(self)[0]

    def init(self, seed: int) -> nnx.State:
        """Fresh parameters; those of the verifier are its own with that seed."""
        return nnx.split(self.network(nnx.Rngs(seed)))[1]

    def abstract_params(self) -> nnx.State:
        """The parameters' shapes, without memory."""
        return jax.tree.map(lambda x: x, skeleton(self)[1])  # a copy: loading fills it in place

    def around(self, full: nnx.State, seed: int) -> nnx.State:
        """Parameters with the verifier's `full`, the same arrays, and a fresh drafter."""
        def begun() -> tuple[nnx.State, nnx.State]:
            network = self.network(nnx.Rngs(seed))
            return nnx.state(network.drafter), nnx.state(network.projection)

        drafter, projection = jax.jit(begun)()
        return nnx.from_flat_state(beneath("verifier", full) | beneath("drafter", drafter)
                                   | beneath("projection", projection))

    def forced(self, params: nnx.State, source: Int[AnyArray, "B S"], source_length: Int[AnyArray, " B"],
               target: Int[AnyArray, "B T"], key: Array | None = None) -> Float[Array, "B T V"]:
        """The verifier's teacher forcing."""
        return self.full.forced(params["verifier"], source, source_length, target, key)

    def forced_members(self, params: nnx.State, source: Int[AnyArray, "B S"],
                       source_length: Int[AnyArray, " B"], target: Int[AnyArray, "B T"],
                       key: Array | None = None, after: AfterLayer = last_written
                       ) -> tuple[Float[Array, "B T V"], ...]:
        """forced() of both members, from one pass of the encoder. `key` turns the drafter's dropout on:
        the verifier's distributions are what it learns from. `after` stands between the verifier's layers."""
        network, tokens = nnx.merge(self.graphdef(), params), self.full.decoder_input(target)
        source_bias = padding_bias(source_length, source.shape[1])
        encoded = network.verifier.encode(source, source_bias)
        verified = network.verifier.decode(encoded, source_bias, tokens, after=after)
        dropout = make_dropout(key, self.config.drafter.dropout_rate)
        drafted = network.drafter.decode(network.projection(encoded), source_bias, tokens, dropout)
        return (network.drafter.logits(drafted, lambda x: dropout(network.drafter.decoder_norm(x))),
                network.verifier.logits(verified))

    def prefill(self, params: nnx.State, inputs: Int[AnyArray, "B S"], input_length: Int[AnyArray, " B"],
                max_length: int) -> tuple[Prefix, SharedEncoderCache]:
        """Encodes the inputs once, for both members."""
        network, rows = nnx.merge(self.graphdef(), params), inputs.shape[0]
        encoded = network.verifier.encode(inputs, padding_bias(input_length, inputs.shape[1]))
        caches = (one.start_from(seen, input_length, max_length, self.cache_dtype) for one, seen in (
            (network.drafter, network.projection(encoded)), (network.verifier, encoded)))
        start = jnp.full((rows, 1), self.config.pad_id, jnp.int32)
        return Prefix(start, jnp.ones((rows,), jnp.int32)), SharedEncoderCache(*caches)

    def lengths(self, cache: SharedEncoderCache) -> Int[Array, "B 2"]:
        return jnp.stack([one.length for one in cache], axis=1)

    def roll_back(self, cache: SharedEncoderCache, length: Int[AnyArray, " B"]) -> SharedEncoderCache:
        return SharedEncoderCache(*(one._replace(length=jnp.minimum(one.length, length)) for one in cache))

    def insert(self, cache: SharedEncoderCache, fresh: SharedEncoderCache, slots: Int[AnyArray, " R"],
               like_fresh: bool) -> SharedEncoderCache:
        return SharedEncoderCache(*(self.full.insert(old, new, slots, like_fresh)
                                    for old, new in zip(cache, fresh, strict=True)))

    def extend(self, params: nnx.State, tokens: Int[AnyArray, "B T"], cache: SharedEncoderCache
               ) -> tuple[Float[Array, "B T V"], SharedEncoderCache]:
        """The verifier's."""
        return self.extend_member(1, params, tokens, cache)

    def extend_member(self, number: int, params: nnx.State, tokens: Int[AnyArray, "B T"],
                      cache: SharedEncoderCache) -> tuple[Float[Array, "B T V"], SharedEncoderCache]:
        name = self.names[number]
        logits, own = getattr(nnx.merge(self.graphdef(), params), name).extend(tokens, getattr(cache, name))
        return logits, cache._replace(**{name: own})
