"""The text model of T5Gemma 2 (Zhang et al. 2025, arXiv 2512.14856) in Flax NNX: an encoder and a decoder
made of Gemma 3's layers.

In the decoder, one attention reads both the text and the encoding. The encoder, the decoder and the logits
share one embedding. `T5Gemma2` is the network, and `T5Gemma2Model` implements LanguageModel.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from speccascade_jax.core.protocols import AnyArray
from speccascade_jax.models.decoder import DecoderConfig, Layer, Memory, Norm, Remember
from speccascade_jax.models.presets import PRESETS as DECODERS
from speccascade_jax.models.rope import Turn
from speccascade_jax.models.stacking import layers_of
from speccascade_jax.models.t5gemma import CrossDecoder, T5Gemma, T5GemmaConfig, T5GemmaModel

Array = jax.Array


SHAPES = {
    size: dataclasses.replace(
        DECODERS[f"gemma3_{size}"],
        vocab_size=262_144,
        rope_type="linear",
        rope_factor=8.0,
        max_positions=131_072,
    )
    for size in ("270m", "1b", "4b")
}
"""The shapes of the published encoders and decoders: those of Gemma 3 at these sizes, for longer texts."""
SMALLEST = SHAPES["270m"]


@dataclasses.dataclass(frozen=True)
class T5Gemma2Config(T5GemmaConfig):
    """The configs of an encoder and a decoder. The defaults are those of 270m-270m."""

    family: ClassVar[str] = "t5gemma2"
    encoder: DecoderConfig = SMALLEST
    decoder: DecoderConfig = SMALLEST
    end_of_image: int = 256_000  # the token whose embedding differs from its logits' weights


PRESETS = {f"t5gemma2_{size}_{size}": T5Gemma2Config(shape, shape) for size, shape in SHAPES.items()}


class MergedLayer(Layer):
    """A decoder layer whose attention covers the text and the encoding in one softmax. Keys and values of the
    encoding have no positions."""

    def kept(self, encoded: Array) -> tuple[Array, ...]:
        """The keys and values [B, H_kv, S, K] of an encoding [B, S, D]."""
        attention = self.attention
        return (
            attention.heads(attention.key(encoded), attention.key_norm),
            attention.heads(attention.value(encoded)),
        )

    def attend(self, x: Array, remember: Remember, turn: Turn, mask: Array, *beside: Any) -> Array:
        return self.attention(x, remember, turn, mask, Memory(*beside))


class MergedDecoder(CrossDecoder):
    """The decoder, and the embedding that it shares with the encoder."""

    def __init__(self, config: T5Gemma2Config, **fields: Any):
        super().__init__(config.decoder, config.encoder.d_model, **fields)
        self.end_of_image = config.end_of_image
        self.image_end = nnx.Param(jnp.zeros((config.decoder.d_model,)))

    def new_layer(self, **fields: Any) -> Layer:
        return MergedLayer(self.config, **fields)

    def embed(self, tokens: AnyArray) -> Array:
        other = self.image_end[...].astype(jnp.float32)
        return jnp.where((tokens == self.end_of_image)[..., None], other, super().embed(tokens))


class Encoder(nnx.Module):
    """The encoder's layers and the norm after them."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: Any = jnp.float32,
        remat: bool = False,
        stacked: bool = False,
        rngs: nnx.Rngs,
    ):
        self.config, self.remat = config, remat
        layers = [Layer(config, dtype=dtype, stacked=stacked, rngs=rngs) for _ in range(config.num_layers)]
        self.layers = layers_of(layers, stacked)
        self.norm = Norm(config)


class T5Gemma2(T5Gemma):
    """The network. `dtype` is that of matrix products; sums and logits are float32."""

    def __init__(self, config: T5Gemma2Config, **fields: Any):
        self.encoder = Encoder(config.encoder, **fields)
        self.decoder = MergedDecoder(config, **fields)

    def embed(self, source: AnyArray) -> Array:
        return self.decoder.embed(source)

    def sight(self, window: int) -> tuple[int, int]:
        """`window` tokens including the position's own. If the others are odd in number, one more of them
        comes after it."""
        return (window + 1) // 2 - 1, window // 2


@dataclasses.dataclass(frozen=True)
class T5Gemma2Model(T5GemmaModel):
    """The LanguageModel of a T5Gemma 2."""

    config: T5Gemma2Config

    def network(self, rngs: nnx.Rngs) -> T5Gemma2:
        return T5Gemma2(
            self.config, dtype=jnp.dtype(self.dtype), remat=self.remat, stacked=self.stacked, rngs=rngs
        )
