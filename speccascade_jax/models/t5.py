"""T5 1.1 (also Flan-T5, lm-adapt, and T5 1.0 with tied embeddings) in Flax NNX.

`T5` is the network, and `T5Model` implements LanguageModel.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from speccascade_jax.core.protocols import AnyArray, Prefix
from speccascade_jax.models.base import SingleModel
from speccascade_jax.models.cache import IN_TURN, T5Cache, blank, entries, remembering
from speccascade_jax.models.layers import (
    AfterLayer,
    Branches,
    Dropout,
    Linear,
    RMSNorm,
    attend,
    attend_in_turn,
    last_written,
    make_dropout,
    project,
    relative_buckets,
    settled,
    shift_right,
    steps_back,
)
from speccascade_jax.models.quantization import table_rows, tied_kernel
from speccascade_jax.models.stacking import (
    blank_states,
    each_layer,
    layers_of,
    nth,
    of_each_layer,
    shared_or_nth,
    with_state,
)

Array = jax.Array
MASKED = -1e9  # finite, so that a fully masked row does not give NaN


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The config of a T5. All defaults except the sizes are those of T5 1.1."""

    family: ClassVar[str] = "t5"
    # The size of the vocabulary, including padding.
    vocab_size: int = 32128
    # The width of the model.
    d_model: int = 512
    # The width of an attention head.
    d_kv: int = 64
    # The width of the MLP.
    d_ff: int = 1024
    # The number of attention heads.
    num_heads: int = 6
    # The number of encoder layers.
    num_encoder_layers: int = 8
    # The number of decoder layers.
    num_decoder_layers: int = 8
    # The number of buckets of relative positions.
    relative_buckets: int = 32
    # Relative positions beyond this distance share a bucket.
    relative_max_distance: int = 128
    # The dropout rate in training.
    dropout_rate: float = 0.1
    # Use a gated MLP (T5 1.1) instead of one relu projection (T5 1.0).
    gated: bool = True
    # Share input and output embeddings, and scale logits by d_model**-0.5 (T5 1.0).
    tied_embeddings: bool = False
    # Share one table of relative positions. Otherwise each layer has its own (scalable_t5 in T5X).
    shared_position_bias: bool = True
    # The padding token, which is also the decoder's start token.
    pad_id: int = 0
    # The end-of-sequence token.
    eos_id: int = 1
    # The epsilon of layer norms.
    layer_norm_epsilon: float = 1e-6


PRESETS = {
    "t5_1_1_small": T5Config(),
    "t5_1_1_base": T5Config(
        d_model=768, d_ff=2048, num_heads=12, num_encoder_layers=12, num_decoder_layers=12
    ),
    "t5_1_1_large": T5Config(
        d_model=1024, d_ff=2816, num_heads=16, num_encoder_layers=24, num_decoder_layers=24
    ),
    "t5_1_1_xl": T5Config(
        d_model=2048, d_ff=5120, num_heads=32, num_encoder_layers=24, num_decoder_layers=24
    ),
    "t5_1_1_xxl": T5Config(
        d_model=4096, d_ff=10240, num_heads=64, num_encoder_layers=24, num_decoder_layers=24
    ),
}


class Attention(nnx.Module):
    """Multi-head attention with T5's initial scales (no 1/sqrt(K), which is part of the query's scale)."""

    def __init__(self, config: T5Config, *, dtype: Any, stacked: bool, rngs: nnx.Rngs):
        c, inner = config, config.num_heads * config.d_kv
        self.query = Linear(c.d_model, inner, std=(c.d_model * c.d_kv) ** -0.5, dtype=dtype, rngs=rngs)
        self.key = Linear(c.d_model, inner, std=c.d_model**-0.5, dtype=dtype, rngs=rngs)
        self.value = Linear(c.d_model, inner, std=c.d_model**-0.5, dtype=dtype, rngs=rngs)
        self.out = Linear(inner, c.d_model, std=inner**-0.5, dtype=dtype, rngs=rngs)
        self.num_heads, self.stacked = c.num_heads, stacked

    def _heads(self, x: Array) -> Array:
        """[B, T, H K] -> [B, H, T, K]"""
        x = settled(x) if self.stacked else x
        return jnp.swapaxes(x.reshape(*x.shape[:-1], self.num_heads, -1), 1, 2)

    def keys_values(self, x: Array) -> tuple[Array, Array]:
        return self._heads(self.key(x)), self._heads(self.value(x))

    def __call__(self, x: Array, keys: Array, values: Array, bias: Array) -> Array:
        look = attend_in_turn if self.stacked and x.shape[1] == IN_TURN else attend
        mixed = look(self._heads(self.query(x)), keys, values, bias)
        return self.out(jnp.swapaxes(mixed, 1, 2).reshape(*x.shape[:-1], -1))


class FeedForward(nnx.Module):
    """T5 1.1: (gelu(x W0) * (x W1)) Wo.  T5 1.0: relu(x W0) Wo."""

    def __init__(self, config: T5Config, *, dtype: Any, rngs: nnx.Rngs):
        c = config
        std = c.d_model**-0.5
        self.gate = Linear(c.d_model, c.d_ff, std=std, dtype=dtype, rngs=rngs)
        self.up = Linear(c.d_model, c.d_ff, std=std, dtype=dtype, rngs=rngs) if c.gated else None
        self.down = Linear(c.d_ff, c.d_model, std=c.d_ff**-0.5, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array, dropout: Dropout) -> Array:
        if self.up is None:
            return self.down(dropout(jax.nn.relu(self.gate(x))))
        return self.down(dropout(jax.nn.gelu(self.gate(x), approximate=True) * self.up(x)))


class EncoderLayer(nnx.Module):
    def __init__(self, config: T5Config, *, dtype: Any, stacked: bool, rngs: nnx.Rngs):
        def norm():
            return RMSNorm(config.d_model, config.layer_norm_epsilon)

        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = Attention(config, dtype=dtype, stacked=stacked, rngs=rngs)
        self.mlp = FeedForward(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array, bias: Array, dropout: Dropout) -> Array:
        h = self.attention_norm(x)
        x = x + dropout(self.attention(h, *self.attention.keys_values(h), bias))
        return x + dropout(self.mlp(self.mlp_norm(x), dropout))


class DecoderLayer(nnx.Module):
    def __init__(self, config: T5Config, *, dtype: Any, stacked: bool, rngs: nnx.Rngs):
        def norm():
            return RMSNorm(config.d_model, config.layer_norm_epsilon)

        self.attention_norm, self.cross_norm, self.mlp_norm = norm(), norm(), norm()
        self.attention = Attention(config, dtype=dtype, stacked=stacked, rngs=rngs)
        self.cross = Attention(config, dtype=dtype, stacked=stacked, rngs=rngs)
        self.mlp = FeedForward(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Array,
        keys_values: Any,
        bias: Array,
        cross_keys: Array,
        cross_values: Array,
        cross_bias: Array,
        dropout: Dropout,
    ) -> Array:
        """`keys_values(k, v)` returns the keys and values to attend to, given those of this call."""
        h = self.attention_norm(x)
        keys, values = keys_values(*self.attention.keys_values(h))
        x = x + dropout(self.attention(h, keys, values, bias))
        x = x + dropout(self.cross(self.cross_norm(x), cross_keys, cross_values, cross_bias))
        return x + dropout(self.mlp(self.mlp_norm(x), dropout))


class T5(nnx.Module):
    """The encoder-decoder network. `dtype` is that of matrix products; sums and logits are float32. Without
    encoder layers it is a decoder that reads another network's encoding.
    """

    def __init__(
        self,
        config: T5Config,
        *,
        dtype: Any = jnp.float32,
        remat: bool = False,
        stacked: bool = False,
        rngs: nnx.Rngs,
    ):
        c = config
        self.config, self.dtype, self.remat = c, jnp.dtype(dtype), remat
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (c.vocab_size, c.d_model)))
        self.encoder = layers_of(
            [EncoderLayer(c, dtype=dtype, stacked=stacked, rngs=rngs) for _ in range(c.num_encoder_layers)],
            stacked,
        )
        self.decoder = layers_of(
            [DecoderLayer(c, dtype=dtype, stacked=stacked, rngs=rngs) for _ in range(c.num_decoder_layers)],
            stacked,
        )
        if c.num_encoder_layers:
            self.encoder_norm = self.new_norm()
        self.decoder_norm = self.new_norm()

        def position_table(layers):
            shape = (c.relative_buckets, c.num_heads)
            return nnx.Param(
                c.d_model**-0.5
                * jax.random.normal(rngs.params(), shape if c.shared_position_bias else (layers, *shape))
            )

        if c.num_encoder_layers:
            self.encoder_bias = position_table(c.num_encoder_layers)
        self.decoder_bias = position_table(c.num_decoder_layers)
        self.head = (
            None
            if c.tied_embeddings
            else Linear(c.d_model, c.vocab_size, std=c.d_model**-0.5, dtype=dtype, rngs=rngs)
        )

    def new_norm(self) -> RMSNorm:
        return RMSNorm(self.config.d_model, self.config.layer_norm_epsilon)

    @property
    def final_norm(self) -> RMSNorm:
        return self.decoder_norm

    def head_kernel(self) -> Array:
        """[D, V]: the kernel of a linear head that gives the logits."""
        if self.head is not None:
            return self.head.kernel[...]
        return self.embedding[...].T * self.config.d_model**-0.5

    def _buckets(self, distance: np.ndarray, *, bidirectional: bool) -> np.ndarray:
        return relative_buckets(
            distance,
            bidirectional=bidirectional,
            num_buckets=self.config.relative_buckets,
            max_distance=self.config.relative_max_distance,
        )

    def _position_biases(self, table: nnx.Param, buckets: np.ndarray) -> list[Array]:
        """The bias [*buckets.shape, H] that all layers share, or one for each layer."""
        return [t[buckets] for t in ([table[...]] if self.config.shared_position_bias else table[...])]

    def _embed(self, tokens: AnyArray) -> Array:
        return table_rows(self.embedding.get_value(), tokens)

    def encode(self, source: AnyArray, source_bias: Array, dropout: Dropout = lambda x: x) -> Array:
        """source [B, S] -> [B, S, D]; `source_bias` [B, 1, 1, S] masks the padding."""
        positions = np.arange(source.shape[1])
        buckets = self._buckets(positions[None, :] - positions[:, None], bidirectional=True)
        biases = [
            jnp.moveaxis(bias, -1, 0)[None] + source_bias
            for bias in self._position_biases(self.encoder_bias, buckets)
        ]

        def apply_layer(n: Any, layer: EncoderLayer, x: Array) -> Array:
            return self._apply(layer, x, shared_or_nth(biases, n), dropout)

        return dropout(self.encoder_norm(each_layer(self.encoder, apply_layer, dropout(self._embed(source)))))

    def _apply(self, layer: EncoderLayer | DecoderLayer, x: Array, *rest: Any) -> Any:
        def call(x):
            return layer(x, *rest)

        return jax.checkpoint(call)(x) if self.remat else call(x)

    def logits(
        self,
        x: Array,
        norm: Callable[[Array], Array] | None = None,
        head: Linear | None = None,
        table: Any = None,
    ) -> Array:
        """The residual stream [B, T, D] -> [B, T, V]. `norm` and `head` replace the network's, and a kernel
        `table` [D, I] replaces the embedding."""
        x = self.decoder_norm(x) if norm is None else norm(x)
        head = self.head if head is None else head
        if head is not None:
            return head(x)
        table = tied_kernel(self.embedding.get_value()) if table is None else table
        return project(x * self.config.d_model**-0.5, table, self.dtype)

    def __call__(
        self,
        source: AnyArray,
        source_length: AnyArray,
        target_in: AnyArray,
        key: Array | None = None,
        after: AfterLayer = last_written,
    ) -> Array:
        """Teacher forcing: the head's input [B, T, D] after each of `target_in` [B, T]. `key` enables
        dropout."""
        dropout = make_dropout(key, self.config.dropout_rate)
        source_bias = padding_bias(source_length, source.shape[1])
        encoded = self.encode(source, source_bias, dropout)
        return dropout(self.decoder_norm(self.decode(encoded, source_bias, target_in, dropout, after)))

    def decode(
        self,
        encoded: Array,
        source_bias: Array,
        target_in: AnyArray,
        dropout: Dropout = lambda x: x,
        after: AfterLayer = last_written,
        more: Array | float = 0.0,
    ) -> Array:
        """Teacher forcing: the last layer's output [B, T, D] after each of `target_in` [B, T], given the
        encoding [B, S, D]. `more` [B, T, D] is added to the embeddings."""
        positions = np.arange(target_in.shape[1])
        distance = positions[None, :] - positions[:, None]
        buckets = self._buckets(distance, bidirectional=False)
        biases = [
            (jnp.moveaxis(bias, -1, 0) + np.where(distance > 0, MASKED, 0.0))[None]
            for bias in self._position_biases(self.decoder_bias, buckets)
        ]

        def apply_layer(n: Any, layer: DecoderLayer, x: Array) -> Array:
            return after(
                n,
                x,
                self._apply(
                    layer,
                    x,
                    lambda k, v: (k, v),
                    shared_or_nth(biases, n),
                    *layer.cross.keys_values(encoded),
                    source_bias,
                    dropout,
                ),
            )

        return each_layer(self.decoder, apply_layer, dropout(self._embed(target_in) + more))

    def start(self, source: AnyArray, source_length: AnyArray, max_length: int, dtype: Any) -> T5Cache:
        """Runs the encoder and returns an empty cache in `dtype` with the keys and values of
        cross-attention."""
        encoded = self.encode(source, padding_bias(source_length, source.shape[1]))
        return self.start_from(encoded, source_length, max_length, dtype)

    def start_from(self, encoded: Array, source_length: AnyArray, max_length: int, dtype: Any) -> T5Cache:
        """The empty cache for an encoding [B, S, D]."""

        def kept(layer: DecoderLayer) -> tuple[Array, Array]:
            keys, values = layer.cross.keys_values(encoded)
            return keys.astype(dtype), values.astype(dtype)

        cross_keys, cross_values = of_each_layer(self.decoder, kept)
        c = self.config
        buffers = blank(self.decoder, encoded.shape[0], c.num_heads, max_length, c.d_kv, dtype)
        buckets = self._buckets(-np.arange(entries(buffers)), bidirectional=False)
        return T5Cache(
            keys=buffers,
            values=buffers,
            cross_keys=cross_keys,
            cross_values=cross_values,
            source_length=jnp.asarray(source_length),
            position_bias=tuple(
                bias.astype(jnp.float32) for bias in self._position_biases(self.decoder_bias, buckets)
            ),
            length=jnp.zeros((encoded.shape[0],), jnp.int32),
        )

    def extend(self, tokens: AnyArray, cache: T5Cache, table: Any = None) -> tuple[Array, T5Cache]:
        """The logits [B, T, V] after each of `tokens` [B, T], read at cache.length."""
        x, cache = self.advance(tokens, cache)
        return self.logits(x, table=table), cache

    def advance(
        self,
        tokens: AnyArray,
        cache: T5Cache,
        depth: int | None = None,
        branches: Branches | None = None,
        more: Array | float = 0.0,
    ) -> tuple[Array, T5Cache]:
        """The output [B, T, D] of layer `depth`, by default the last, for each of `tokens` [B, T], read at
        cache.length, in sequence or as branches. Layers above it do not run. `more` is as in decode()."""
        x, _, cache = self.advance_with_states(tokens, cache, (), depth, branches, more)
        return x, cache

    def advance_with_states(
        self,
        tokens: AnyArray,
        cache: T5Cache,
        before: tuple[int, ...],
        depth: int | None = None,
        branches: Branches | None = None,
        more: Array | float = 0.0,
    ) -> tuple[Array, Any, T5Cache]:
        """advance(), with the tokens' states [N, B, T, D] before N layers, in the order of `before`. 0 is the
        embedding; the number of layers means the last layer's output before the norm. None if `before` is
        empty."""
        back = steps_back(cache.length, tokens.shape[1], entries(cache.keys), branches)  # [B, T, L]
        biases = [
            jnp.moveaxis(jnp.where(back[..., None] >= 0, bias[jnp.maximum(back, 0)], MASKED), -1, 1)
            for bias in cache.position_bias
        ]
        source_bias = padding_bias(cache.source_length, entries(cache.cross_keys))

        def apply_layer(n: Any, layer: DecoderLayer, carry: Any) -> Any:
            x, states, *buffers = carry
            states = with_state(states, before, n, x)
            x = layer(
                x,
                remembering(buffers, n, cache.length),
                shared_or_nth(biases, n),
                nth(cache.cross_keys, n),
                nth(cache.cross_values, n),
                source_bias,
                lambda x: x,
            )
            return x, states, *buffers

        x = self._embed(tokens) + more
        begun = x, blank_states(before, x), cache.keys, cache.values
        x, states, keys, values = each_layer(self.decoder, apply_layer, begun, depth)
        if states is not None:
            states = with_state(states, before, self.config.num_decoder_layers, x)[:-1]
        return x, states, cache._replace(keys=keys, values=values, length=cache.length + tokens.shape[1])


def padding_bias(length: AnyArray, size: int) -> Array:
    """[B, 1, 1, size]: 0 before each row's length, MASKED from there on."""
    return jnp.where(jnp.arange(size) < length[:, None], 0.0, MASKED)[:, None, None, :]


@dataclasses.dataclass(frozen=True)
class T5Model(SingleModel):
    """The LanguageModel of a T5. Its initial scales are those of T5X."""

    config: T5Config

    def network(self, rngs: nnx.Rngs) -> T5:
        return T5(self.config, dtype=jnp.dtype(self.dtype), remat=self.remat, stacked=self.stacked, rngs=rngs)

    def forced_states(
        self,
        params: nnx.State,
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
        after: AfterLayer = last_written,
    ) -> Float[Array, "B T D"]:
        return self.merged(params)(source, source_length, self.decoder_input(target), key, after)

    def decoder_input(self, target: Int[AnyArray, "B T"]) -> Int[Array, "B T"]:
        """`target` shifted right, after the start token."""
        return shift_right(target, jnp.full((target.shape[0],), self.config.pad_id, target.dtype))

    def prefill(
        self,
        params: nnx.State,
        inputs: Int[AnyArray, "B S"],
        input_length: Int[AnyArray, " B"],
        max_length: int,
    ) -> tuple[Prefix, T5Cache]:
        start = jnp.full((inputs.shape[0], 1), self.config.pad_id, jnp.int32)
        return (
            Prefix(start, jnp.ones((inputs.shape[0],), jnp.int32)),
            self.merged(params).start(inputs, input_length, max_length, self.cache_dtype),
        )

    def extend(
        self, params: nnx.State, tokens: Int[AnyArray, "B T"], cache: T5Cache, table: Any = None
    ) -> tuple[Float[Array, "B T V"], T5Cache]:
        """`table`, a kernel [D, V], replaces the embedding in the logits."""
        return self.merged(params).extend(tokens, cache, table)
