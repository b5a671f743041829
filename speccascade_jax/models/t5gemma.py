"""T5Gemma (Zhang et al. 2025, arXiv 2504.06225) in Flax NNX: an encoder and a decoder made of Gemma 2's
layers.

`T5Gemma` is the network, and `T5GemmaModel` implements LanguageModel.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from speccascade_jax.core.protocols import AnyArray, Prefix
from speccascade_jax.models.base import SingleModel
from speccascade_jax.models.cache import T5Cache, blank, entries
from speccascade_jax.models.decoder import Attention, Decoder, DecoderConfig, Layer, Norm, kind_of, mixed
from speccascade_jax.models.layers import AfterLayer, last_written, shift_right
from speccascade_jax.models.presets import GEMMA2
from speccascade_jax.models.presets import PRESETS as DECODERS
from speccascade_jax.models.rope import turns
from speccascade_jax.models.stacking import each_layer, nth, of_each_layer

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class T5GemmaConfig:
    """The configs of an encoder and a decoder. The defaults are those of 2b-2b."""

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
        """The token that every output begins with."""
        return self.decoder.bos_id


PRESETS = {
    f"t5gemma_{reads}_{writes}": T5GemmaConfig(DECODERS[f"gemma2_{reads}"], DECODERS[f"gemma2_{writes}"])
    for reads, writes in (("2b", "2b"), ("9b", "2b"), ("9b", "9b"))
}


class CrossLayer(Layer):
    """A decoder layer with cross-attention between its attention and its MLP."""

    def __init__(self, config: DecoderConfig, reads: int, *, dtype: Any, stacked: bool, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, stacked=stacked, rngs=rngs)
        self.cross_norm, self.cross_post_norm = Norm(config), Norm(config)
        self.cross = Attention(config, reads=reads, dtype=dtype, stacked=stacked, rngs=rngs)

    def kept(self, encoded: Array) -> tuple[Array, ...]:
        """The keys and values [B, H_kv, S, K] of an encoding [B, S, D]."""
        return tuple(self.cross.heads(made(encoded)) for made in (self.cross.key, self.cross.value))

    def between(self, x: Array, keys: Array, values: Array, mask: Array) -> Array:
        query = self.cross.heads(self.cross.query(self.cross_norm(x)))
        attended = self.cross.out(mixed(self.cross.config, query, keys, values, mask))
        return x + self.cross_post_norm(attended)


class CrossDecoder(Decoder):
    def __init__(self, config: DecoderConfig, reads: int, **fields: Any):
        self.reads = reads
        super().__init__(config, **fields)

    def new_layer(self, **fields: Any) -> Layer:
        return CrossLayer(self.config, self.reads, **fields)

    def beside(self, cache: T5Cache, number: Any) -> tuple[Any, ...]:
        seen = jnp.arange(entries(cache.cross_keys)) < cache.source_length[:, None]
        return nth(cache.cross_keys, number), nth(cache.cross_values, number), seen[:, None]


class T5Gemma(nnx.Module):
    """The network. `dtype` is that of matrix products; sums and logits are float32."""

    encoder: Any  # layers and a final norm

    def __init__(self, config: T5GemmaConfig, **fields: Any):
        reads = dataclasses.replace(config.encoder, tied_embeddings=True)  # the encoder has no head
        self.encoder = Decoder(reads, **fields)
        self.decoder = CrossDecoder(config.decoder, reads.d_model, **fields)

    def embed(self, source: AnyArray) -> Array:
        """source [B, S] -> [B, S, D]"""
        return self.encoder.embed(source)

    def sight(self, window: int) -> tuple[int, int]:
        """The number of tokens before and after a position that a local layer of the encoder attends to."""
        return window, window

    def encode(self, source: AnyArray, source_length: AnyArray) -> Array:
        """source [B, S] -> [B, S, D]"""
        network, c = self.encoder, self.encoder.config
        rows, size = source.shape
        place = jnp.broadcast_to(jnp.arange(size), (rows, size))
        everything = jnp.broadcast_to((place < source_length[:, None])[:, None], (rows, size, size))
        near = everything
        if c.window is not None:
            back, (before, after) = place[:, :, None] - place[:, None], self.sight(c.window)
            near = everything & (back <= before) & (-back <= after)
        kinds = tuple(zip(turns(c, place), (everything, near), strict=True))

        def apply_layer(n: Any, layer: Layer, x: Array) -> Array:
            def call(x, *kind):
                return layer(x, lambda keys, values: (keys, values), *kind)

            return (jax.checkpoint(call) if network.remat else call)(x, *kind_of(c, kinds, n))

        return network.norm(each_layer(network.layers, apply_layer, self.embed(source)))

    def start(self, source: AnyArray, source_length: AnyArray, max_length: int, dtype: Any) -> T5Cache:
        """Runs the encoder and returns an empty cache in `dtype` with the keys and values of
        cross-attention."""
        encoded, c = self.encode(source, source_length), self.decoder.config
        buffers = blank(self.decoder.layers, source.shape[0], c.num_kv_heads, max_length, c.d_kv, dtype)

        def kept(layer: Any) -> tuple[Array, ...]:
            return tuple(x.astype(dtype) for x in layer.kept(encoded))

        cross_keys, cross_values = of_each_layer(self.decoder.layers, kept)
        return T5Cache(
            keys=buffers,
            values=buffers,
            cross_keys=cross_keys,
            cross_values=cross_values,
            source_length=jnp.asarray(source_length),
            position_bias=(),
            length=jnp.zeros((source.shape[0],), jnp.int32),
        )


@dataclasses.dataclass(frozen=True)
class T5GemmaModel(SingleModel):
    """The LanguageModel of a T5Gemma."""

    config: T5GemmaConfig

    def network(self, rngs: nnx.Rngs) -> T5Gemma:
        return T5Gemma(
            self.config, dtype=jnp.dtype(self.dtype), remat=self.remat, stacked=self.stacked, rngs=rngs
        )

    def decoder_of(self, params: nnx.State) -> CrossDecoder:
        return self.merged(params).decoder

    def forced_states(
        self,
        params: nnx.State,
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
        after: AfterLayer = last_written,
    ) -> Float[Array, "B T D"]:
        """There is no dropout, so `key` is ignored."""
        network = self.merged(params)
        cache = network.start(source, source_length, target.shape[1], self.cache_dtype)
        begin = jnp.full((target.shape[0],), self.config.start_id, target.dtype)
        x, _ = network.decoder.advance(shift_right(target, begin), cache, after=after)
        return network.decoder.final_norm(x)

    def prefill(
        self,
        params: nnx.State,
        inputs: Int[AnyArray, "B S"],
        input_length: Int[AnyArray, " B"],
        max_length: int,
    ) -> tuple[Prefix, T5Cache]:
        start = jnp.full((inputs.shape[0], 1), self.config.start_id, jnp.int32)
        return (
            Prefix(start, jnp.ones((inputs.shape[0],), jnp.int32)),
            self.merged(params).start(inputs, input_length, max_length, self.cache_dtype),
        )

    def extend(
        self, params: nnx.State, tokens: Int[AnyArray, "B T"], cache: T5Cache
    ) -> tuple[Float[Array, "B T V"], T5Cache]:
        network = self.decoder_of(params)
        x, cache = network.advance(tokens, cache)
        return network.logits(x), cache
