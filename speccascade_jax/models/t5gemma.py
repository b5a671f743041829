"""T5Gemma (Zhang et al. 2025, arXiv 2504.06225) in Flax NNX: an encoder and a decoder made of Gemma 2's
layers.

`T5Gemma` is the network; `T5GemmaModel` is the LanguageModel the decoding core sees.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from speccascade_jax.core.typing import AnyArray, Prefix, insert_rows
from speccascade_jax.models.cache import T5Cache, empty, insert_layers
from speccascade_jax.models.decoder import Attention, Decoder, DecoderConfig, Layer, Norm, mixed
from speccascade_jax.models.layers import (
    AfterLayer,
    Branches,
    last_written,
    read_branches,
    shift_right,
    skeleton,
)
from speccascade_jax.models.presets import GEMMA2
from speccascade_jax.models.presets import PRESETS as DECODERS
from speccascade_jax.models.rope import turns

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class T5GemmaConfig:
    """An encoder's and a decoder's shape. The defaults are those of 2b-2b."""

    family: ClassVar[str] = "t5gemma"
    encoder: DecoderConfig = GEMMA2
    decoder: DecoderConfig = GEMMA2

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def pad_id(self) -> int:
        return self.decoder.pad_id

    @property
    def eos_id(self) -> int:
        return self.decoder.eos_id

    @property
    def more_eos(self) -> tuple[int, ...]:
        return self.decoder.more_eos

    @property
    def start_id(self) -> int:
        """What every output begins with."""
        return self.decoder.bos_id


PRESETS = {f"t5gemma_{reads}_{writes}": T5GemmaConfig(DECODERS[f"gemma2_{reads}"],
                                                      DECODERS[f"gemma2_{writes}"])
           for reads, writes in (("2b", "2b"), ("9b", "2b"), ("9b", "9b"))}


class CrossLayer(Layer):
    """A decoder's layer that also reads what was encoded, between its attention and its MLP."""

    def __init__(self, config: DecoderConfig, reads: int, *, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.cross_norm, self.cross_post_norm = Norm(config), Norm(config)
        self.cross = Attention(config, reads=reads, dtype=dtype, rngs=rngs)

    def between(self, x: Array, keys: Array, values: Array, mask: Array) -> Array:
        query = self.cross.heads(self.cross.query(self.cross_norm(x)))
        found = self.cross.out(mixed(self.cross.config, query, keys, values, mask))
        return x + self.cross_post_norm(found)


class CrossDecoder(Decoder):
    def __init__(self, config: DecoderConfig, reads: int, *, dtype: Any, remat: bool, rngs: nnx.Rngs):
        self.reads = reads
        super().__init__(config, dtype=dtype, remat=remat, rngs=rngs)

    def new_layer(self, dtype: Any, rngs: nnx.Rngs) -> CrossLayer:
        return CrossLayer(self.config, self.reads, dtype=dtype, rngs=rngs)

    def beside(self, cache: T5Cache, layer: int) -> tuple[Any, ...]:
        keys = cache.cross_keys[layer]
        seen = jnp.arange(keys.shape[-2]) < cache.source_length[:, None]
        return keys, cache.cross_values[layer], seen[:, None]


class T5Gemma(nnx.Module):
    """The network. `dtype` is the matrix products'; sums and logits are float32."""

    def __init__(self, config: T5GemmaConfig, *, dtype: Any = jnp.float32, remat: bool = False,
                 rngs: nnx.Rngs):
        reads = dataclasses.replace(config.encoder, tied_embeddings=True)  # it has no head
        self.encoder = Decoder(reads, dtype=dtype, remat=remat, rngs=rngs)
        self.decoder = CrossDecoder(config.decoder, reads.d_model, dtype=dtype, remat=remat, rngs=rngs)

    def encode(self, source: AnyArray, source_length: AnyArray) -> Array:
        """source [B, S] -> [B, S, D]"""
        network, c = self.encoder, self.encoder.config
        rows, size = source.shape
        place = jnp.broadcast_to(jnp.arange(size), (rows, size))
        everything = jnp.broadcast_to((place < source_length[:, None])[:, None], (rows, size, size))
        distance = jnp.abs(place[:, :, None] - place[:, None])
        near = everything if c.window is None else everything & (distance <= c.window)
        kinds = tuple(zip(turns(c, place), (everything, near), strict=True))
        blank, start = jnp.zeros((rows, c.num_kv_heads, size, c.d_kv)), jnp.zeros((rows,), jnp.int32)
        x = network.embed(source)
        for n, layer in enumerate(network.layers):
            def call(x, turn, mask, layer=layer):
                return layer(x, blank, blank, start, turn, mask)[0]

            x = (jax.checkpoint(call) if network.remat else call)(x, *kinds[c.is_local(n)])
        return network.norm(x)

    def start(self, source: AnyArray, source_length: AnyArray, max_length: int, dtype: Any) -> T5Cache:
        """Runs the encoder: an empty cache in `dtype`, with the keys and values of cross-attention."""
        encoded, c = self.encode(source, source_length), self.decoder.config
        cross = [cast(CrossLayer, layer).cross for layer in self.decoder.layers]
        blank = empty(source.shape[0], c.num_kv_heads, max_length, c.d_kv, dtype)
        return T5Cache(
            keys=(blank,) * c.num_layers, values=(blank,) * c.num_layers,
            cross_keys=tuple(one.heads(one.key(encoded)).astype(dtype) for one in cross),
            cross_values=tuple(one.heads(one.value(encoded)).astype(dtype) for one in cross),
            source_length=jnp.asarray(source_length), position_bias=(),
            length=jnp.zeros((source.shape[0],), jnp.int32))


@dataclasses.dataclass(frozen=True)
class T5GemmaModel:
    """A T5Gemma as the decoding core's LanguageModel: static and hashable, parameters passed in."""

    config: T5GemmaConfig
    dtype: str = "float32"        # of the matrix products; int8 where their kernels are packed so
    cache_dtype: str = "float32"  # of remembered keys and values: CPUs attend faster in float32
    remat: bool = False           # recompute each layer in the backward pass

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def network(self, rngs: nnx.Rngs) -> T5Gemma:
        return T5Gemma(self.config, dtype=jnp.dtype(self.dtype), remat=self.remat, rngs=rngs)

    def graphdef(self) -> nnx.GraphDef:
        return skeleton(self)[0]

    def init(self, seed: int) -> nnx.State:
        """Fresh parameters."""
        return nnx.split(self.network(nnx.Rngs(seed)))[1]

    def abstract_params(self) -> nnx.State:
        """The parameters' shapes, without memory."""
        return jax.tree.map(lambda x: x, skeleton(self)[1])  # a copy: loading fills it in place

    def forced(self, params: nnx.State, source: Int[AnyArray, "B S"], source_length: Int[AnyArray, " B"],
               target: Int[AnyArray, "B T"], key: Array | None = None, after: AfterLayer = last_written
               ) -> Float[Array, "B T V"]:
        """Teacher forcing: logits [B, T, V] that predict each of `target` [B, T]. There is no dropout: `key`
        is not read. `after` stands between the decoder's layers."""
        network = nnx.merge(self.graphdef(), params)
        cache = network.start(source, source_length, target.shape[1], self.cache_dtype)
        begin = jnp.full((target.shape[0],), self.config.start_id, target.dtype)
        return network.decoder.logits(network.decoder.advance(shift_right(target, begin), cache,
                                                              after=after)[0])

    def prefill(self, params: nnx.State, inputs: Int[AnyArray, "B S"], input_length: Int[AnyArray, " B"],
                max_length: int) -> tuple[Prefix, T5Cache]:
        start = jnp.full((inputs.shape[0], 1), self.config.start_id, jnp.int32)
        network = nnx.merge(self.graphdef(), params)
        return (Prefix(start, jnp.ones((inputs.shape[0],), jnp.int32)),
                network.start(inputs, input_length, max_length, self.cache_dtype))

    def roll_back(self, cache: T5Cache, length: Int[AnyArray, " B"]) -> T5Cache:
        return cache._replace(length=jnp.asarray(length))

    def insert(self, cache: T5Cache, fresh: T5Cache, slots: Int[AnyArray, " R"], like_fresh: bool) -> T5Cache:
        placed = partial(insert_layers, slots=slots, like_fresh=like_fresh)
        lengths = insert_rows((cache.source_length, cache.length), (fresh.source_length, fresh.length), slots,
                              like_fresh)
        return T5Cache(placed(cache.keys, fresh.keys), placed(cache.values, fresh.values),
                       placed(cache.cross_keys, fresh.cross_keys),
                       placed(cache.cross_values, fresh.cross_values), lengths[0], (), lengths[1])

    def extend_branches(self, params: nnx.State, tokens: Int[AnyArray, " M"], cache: T5Cache,
                        branches: Branches) -> Float[Array, "B M V"]:
        """Float32 logits after each node of a tree of texts; the cache stays as it is."""
        return read_branches(nnx.merge(self.graphdef(), params).decoder, tokens, cache, branches)

    def extend(self, params: nnx.State, tokens: Int[AnyArray, "B T"], cache: T5Cache
               ) -> tuple[Float[Array, "B T V"], T5Cache]:
        network = nnx.merge(self.graphdef(), params).decoder
        x, cache = network.advance(tokens, cache)
        return network.logits(x), cache
