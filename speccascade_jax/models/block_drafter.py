"""A drafter for T5 that writes a whole draft in one pass (like DFlash: Chen et al. 2026, arXiv 2602.06036).

It reads the last committed token and a mask for each further place of the draft. These attend to each other
in both directions, to keys and values made from the verifier's states at the committed positions, and to the
verifier's encoder. Embeddings and head are the verifier's.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Bool, Float, Int
from tyro.conf import Suppress

from speccascade_jax.core.protocols import MASK, AnyArray, Prefix
from speccascade_jax.models.base import Keys
from speccascade_jax.models.cache import T5Cache, blank, entries, remembering, with_more
from speccascade_jax.models.layers import (
    AfterLayer,
    Dropout,
    Linear,
    RMSNorm,
    last_written,
    make_dropout,
    relative_buckets,
    steps_back,
)
from speccascade_jax.models.members import NetworkShape, PairModel, beneath
from speccascade_jax.models.stacking import each_layer, layers_of, nth, of_each_layer
from speccascade_jax.models.t5 import MASKED, T5, DecoderLayer, T5Config, T5Model, padding_bias

Array = jax.Array
SHORTEST = 4
"""Tokens of the shortest draft in training, including the one after it. The logarithm of the length is
uniform."""
DRAWN = 1_000_000  # folded into a key into which dropout folds smaller numbers


@dataclasses.dataclass(frozen=True)
class BlockDrafterConfig(NetworkShape):
    """A verifier and the layers that draft for it. Its fields are not flags of a training run."""

    family: ClassVar[str] = "block_drafter"
    full_part: ClassVar[str] = "verifier"  # where the full model's parameters are
    verifier: T5Config = dataclasses.field(default_factory=T5Config)
    states: Suppress[tuple[int, ...]] = (2, 4, 8)  # numbers of verifier layers after which states are read
    block_size: Suppress[int] = 16  # most tokens of a draft
    num_layers: Suppress[int] = 1
    num_heads: Suppress[int] = 6
    d_kv: Suppress[int] = 64
    d_ff: Suppress[int] = 1024

    @property
    def full(self) -> T5Config:
        return self.verifier

    @property
    def layer(self) -> T5Config:
        """The shape of the drafter's layers, which are those of a decoder as wide as the verifier's."""
        return dataclasses.replace(
            self.verifier,
            num_heads=self.num_heads,
            d_kv=self.d_kv,
            d_ff=self.d_ff,
            num_encoder_layers=0,
            num_decoder_layers=self.num_layers,
        )


class BlockDrafterCache(NamedTuple):
    """The caches of a drafter and its verifier. The drafter's keys and values are made from the verifier's
    states, so both have the same length."""

    drafter: Any  # of the same type as the verifier's
    verifier: Any

    @property
    def length(self) -> Int[Array, " B"]:
        return self.verifier.length


class Drafter(nnx.Module):
    """The drafting layers, and the projection of the verifier's states that they read."""

    def __init__(self, config: BlockDrafterConfig, *, dtype: Any, stacked: bool, rngs: nnx.Rngs):
        shape, self.config = config.layer, config
        width, count = shape.d_model, len(config.states)
        self.layers = layers_of(
            [DecoderLayer(shape, dtype=dtype, stacked=stacked, rngs=rngs) for _ in range(config.num_layers)],
            stacked,
        )
        self.bias = nnx.Param(
            width**-0.5 * jax.random.normal(rngs.params(), (shape.relative_buckets, shape.num_heads))
        )
        self.masks = nnx.Param(jax.random.normal(rngs.params(), (config.block_size, width)))
        self.mix = Linear(count * width, width, std=(count * width) ** -0.5, dtype=dtype, rngs=rngs)
        self.mix_norm, self.norm = (RMSNorm(width, shape.layer_norm_epsilon) for _ in range(2))

    def mixed(self, states: Float[Array, "N B T D"]) -> Float[Array, "B T D"]:
        """Combines the states of several layers, each divided by its root mean square."""
        square = jnp.mean(jnp.square(states), axis=-1, keepdims=True)
        states = states * lax.rsqrt(square + self.config.layer.layer_norm_epsilon)
        return self.mix_norm(self.mix(jnp.concatenate(list(states), axis=-1)))

    def start(self, encoded: Array, source_length: AnyArray, max_length: int, dtype: Any) -> T5Cache:
        """The empty cache for an encoded source [B, S, D]. Its position_bias is for keys 0 .. L - 1 steps
        back, followed by those ahead, the nearest last."""

        def kept(layer: DecoderLayer) -> tuple[Array, Array]:
            keys, values = layer.cross.keys_values(encoded)
            return keys.astype(dtype), values.astype(dtype)

        cross_keys, cross_values = of_each_layer(self.layers, kept)
        shape, rows = self.config.layer, encoded.shape[0]
        buffers = blank(self.layers, rows, shape.num_heads, max_length, shape.d_kv, dtype)
        ahead = np.arange(self.config.block_size, 0, -1)
        distance = np.concatenate([-np.arange(entries(buffers)), ahead])
        return T5Cache(
            buffers,
            buffers,
            cross_keys,
            cross_values,
            jnp.asarray(source_length),
            (self.bias[...][self.buckets(distance)].astype(jnp.float32),),
            jnp.zeros((rows,), jnp.int32),
        )

    def buckets(self, distance: np.ndarray) -> np.ndarray:
        shape = self.config.layer
        return relative_buckets(
            distance,
            bidirectional=True,
            num_buckets=shape.relative_buckets,
            max_distance=shape.relative_max_distance,
        )

    def remember(self, states: Float[Array, "N B T D"], cache: T5Cache) -> T5Cache:
        """The cache with the keys and values of T more of the verifier's states."""
        mixed = self.mixed(states)

        new = of_each_layer(self.layers, lambda layer: layer.attention.keys_values(mixed))
        return with_more(cache, new, mixed.shape[1])

    def embedded(self, tokens: Int[AnyArray, "B T"], verifier: T5) -> Float[Array, "B T D"]:
        """The embeddings of committed tokens, and of masks by their place among the masks."""
        place = jnp.clip(jnp.cumsum(tokens < 0, axis=1) - 1, 0, self.config.block_size - 1)
        known = verifier._embed(jnp.maximum(tokens, 0))
        return jnp.where((tokens < 0)[..., None], self.masks[...][place], known)

    def draft(
        self, tokens: Int[AnyArray, "B T"], verifier: T5, cache: T5Cache
    ) -> tuple[Float[Array, "B T V"], T5Cache]:
        """The logits of the token after each of `tokens`, some of which are masks, and the cache. Only
        scratch entries of the cache change, which avoids a copy of its buffers."""
        count, size = tokens.shape[1], entries(cache.keys)
        back = jnp.maximum(steps_back(cache.length, count, size), -self.config.block_size)  # [B, T, L]
        shown = seen(tokens, cache.length, back)[..., None]
        bias = jnp.moveaxis(jnp.where(shown, cache.position_bias[0][back], MASKED), -1, 1)
        source_bias = padding_bias(cache.source_length, entries(cache.cross_keys))

        def apply_layer(n: Any, layer: DecoderLayer, carry: Any) -> Any:
            x, *buffers = carry
            remember = remembering(buffers, n, cache.length)
            crossed = nth(cache.cross_keys, n), nth(cache.cross_values, n)
            return layer(x, remember, bias, *crossed, source_bias, lambda x: x), *buffers

        begun = self.embedded(tokens, verifier), cache.keys, cache.values
        x, keys, values = each_layer(self.layers, apply_layer, begun)
        return verifier.logits(x, self.norm), cache._replace(keys=keys, values=values)

    def forced(
        self,
        tokens: Int[AnyArray, "B T"],
        begins: Int[Array, "B T"],
        states: Float[Array, "N B T D"],
        encoded: Float[Array, "B S D"],
        source_bias: Array,
        verifier: T5,
        dropout: Dropout,
    ) -> Float[Array, "B T V"]:
        """draft() at every position of a text. Each position belongs to the draft that begins after the
        committed token at `begins`, and does not see the text from there on."""
        position = np.arange(tokens.shape[1])
        place = position - begins
        x = jnp.where(
            (place > 0)[..., None], self.masks[...][jnp.maximum(place - 1, 0)], verifier._embed(tokens)
        )
        by_bucket = jnp.moveaxis(self.bias[...][self.buckets(position[None, :] - position[:, None])], -1, 0)
        known = position < begins[..., None]
        together = begins[:, None, :] == begins[..., None]
        bias = jnp.concatenate(
            [jnp.where(shown[:, None], by_bucket, MASKED) for shown in (known, together)], axis=-1
        )
        mixed = self.mixed(states)

        def apply_layer(_: Any, layer: DecoderLayer, x: Array) -> Array:
            committed = layer.attention.keys_values(mixed)

            def both(*drafted: Array) -> tuple[Array, ...]:
                return tuple(jnp.concatenate(pair, axis=2) for pair in zip(committed, drafted, strict=True))

            return layer(x, both, bias, *layer.cross.keys_values(encoded), source_bias, dropout)

        x = each_layer(self.layers, apply_layer, dropout(x))
        return verifier.logits(x, lambda x: dropout(self.norm(x)))


def seen(
    tokens: Int[AnyArray, "B T"], length: Int[Array, " B"], back: Int[Array, "B T L"]
) -> Bool[Array, "B T L"]:
    """A mask of the keys that each of `tokens`, written at `length`, attends to: all committed tokens before
    it, and all masks among `tokens`, but no committed token after it."""
    count = tokens.shape[1]
    place = jnp.arange(back.shape[2]) - length[:, None]
    key = jnp.take_along_axis(tokens, jnp.clip(place, 0, count - 1), axis=1)
    shown = (place < 0) | ((place < count) & (key == MASK))
    known = (place >= 0) & (place < count) & (key >= 0)
    return shown[:, None] | (known[:, None] & (back >= 0)) | (back == 0)


class BlockDrafter(nnx.Module):
    """The verifier's network and the drafter's."""

    def __init__(self, config: BlockDrafterConfig, *, dtype: Any, remat: bool, stacked: bool, rngs: nnx.Rngs):
        self.verifier = T5(config.verifier, dtype=dtype, remat=remat, stacked=stacked, rngs=rngs)
        self.drafter = Drafter(config, dtype=dtype, stacked=stacked, rngs=rngs)

    def advance(self, tokens: AnyArray, cache: BlockDrafterCache) -> tuple[Array, BlockDrafterCache]:
        """The verifier's advance(). Its states become the drafter's keys and values."""
        states = self.drafter.config.states
        x, features, verifier = self.verifier.advance_with_states(tokens, cache.verifier, states)
        return x, BlockDrafterCache(self.drafter.remember(features, cache.drafter), verifier)

    def draft(
        self, tokens: AnyArray, cache: BlockDrafterCache
    ) -> tuple[Float[Array, "B T V"], BlockDrafterCache]:
        """The logits of the token after each of `tokens`, which are committed tokens that the cache lacks and
        masks. The cache does not become longer."""
        logits, drafter = self.drafter.draft(tokens, self.verifier, cache.drafter)
        return logits, cache._replace(drafter=drafter)


@dataclasses.dataclass(frozen=True)
class BlockPairModel(PairModel):
    """A network of two members, "drafter", which writes several tokens at once, and "verifier". Used alone it
    is the verifier. Its cache is a BlockDrafterCache."""

    def prefill(
        self,
        params: nnx.State,
        inputs: Int[AnyArray, "B S"],
        input_length: Int[AnyArray, " B"],
        max_length: int,
    ) -> tuple[Prefix, BlockDrafterCache]:
        """The verifier's prefill, which also fills the drafter's cache."""
        raise NotImplementedError

    def lengths(self, cache: BlockDrafterCache) -> Int[Array, "B 2"]:
        return jnp.stack([cache.length, cache.length], axis=1)

    def roll_back(self, cache: BlockDrafterCache, length: Int[AnyArray, " B"]) -> BlockDrafterCache:
        shorter = jnp.minimum(cache.length, length)
        return BlockDrafterCache(*(part._replace(length=shorter) for part in cache))

    def insert(
        self,
        cache: BlockDrafterCache,
        fresh: BlockDrafterCache,
        slots: Int[AnyArray, " R"],
        like_fresh: bool,
    ) -> BlockDrafterCache:
        pairs = zip(cache, fresh, strict=True)
        return BlockDrafterCache(*(self.full.insert(old, new, slots, like_fresh) for old, new in pairs))


@dataclasses.dataclass(frozen=True)
class BlockDrafterModel(BlockPairModel):
    """A T5 and its block drafter. The verifier's initial parameters are the same as without a drafter for the
    same seed."""

    config: BlockDrafterConfig

    @property
    def draft_size(self) -> int:
        """The number of tokens that the drafter writes in one pass."""
        return self.config.block_size

    @property
    def full(self) -> T5Model:
        """The verifier without the drafter."""
        return T5Model(self.config.verifier, self.dtype, self.cache_dtype, self.remat, self.stacked)

    def network(self, rngs: nnx.Rngs) -> BlockDrafter:
        return BlockDrafter(
            self.config, dtype=jnp.dtype(self.dtype), remat=self.remat, stacked=self.stacked, rngs=rngs
        )

    def around(self, full: nnx.State, seed: int) -> nnx.State:
        """Parameters that contain the verifier's `full` (the same arrays), and a fresh drafter whose last
        norm is the verifier's."""

        def begun(scale: Array) -> nnx.State:
            network = self.network(Keys(seed))
            network.drafter.norm.scale[...] = scale
            return nnx.state(network.drafter)

        drafter = jax.jit(begun)(full["decoder_norm"]["scale"][...])
        return nnx.from_flat_state(beneath("verifier", full) | beneath("drafter", drafter))

    def full_pass(
        self,
        params: nnx.State,
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
        after: AfterLayer = last_written,
    ) -> tuple[Float[Array, "B S D"], tuple[Float[Array, "B T D"], ...], Float[Array, "B T D"]]:
        """The encoding, the states that the drafter reads, and the input of the verifier's head. The verifier
        has no dropout."""
        verifier, tokens = self.merged(params).verifier, self.full.decoder_input(target)
        source_bias = padding_bias(source_length, source.shape[1])
        encoded = verifier.encode(source, source_bias)
        before: dict[int, Array] = {}

        def kept(number: int, x: Array, new: Array) -> Array:
            before[number] = x
            return after(number, x, new)

        last = verifier.decode(encoded, source_bias, tokens, after=kept)
        before[self.config.verifier.num_decoder_layers] = last
        return encoded, tuple(before[number] for number in self.config.states), verifier.decoder_norm(last)

    def member_logits(
        self,
        params: nnx.State,
        read: tuple[Float[Array, "B S D"], tuple[Float[Array, "B T D"], ...], Float[Array, "B T D"]],
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T V"], ...]:
        """Drafts begin as in begins(). `key` enables dropout in the drafter."""
        network, tokens = self.merged(params), self.full.decoder_input(target)
        encoded, states, last = read
        drafted = network.drafter.forced(
            tokens,
            begins(tokens, self.config.block_size + 1, key),
            jnp.stack(states),
            encoded,
            padding_bias(source_length, source.shape[1]),
            network.verifier,
            make_dropout(key, self.config.verifier.dropout_rate),
        )
        return drafted, network.verifier.logits(last, lambda x: x)

    def prefill(
        self,
        params: nnx.State,
        inputs: Int[AnyArray, "B S"],
        input_length: Int[AnyArray, " B"],
        max_length: int,
    ) -> tuple[Prefix, BlockDrafterCache]:
        """Encodes the inputs once, for both members."""
        network, rows = self.merged(params), inputs.shape[0]
        encoded = network.verifier.encode(inputs, padding_bias(input_length, inputs.shape[1]))
        start = jnp.full((rows, 1), self.config.pad_id, jnp.int32)
        return Prefix(start, jnp.ones((rows,), jnp.int32)), BlockDrafterCache(
            network.drafter.start(encoded, input_length, max_length, self.cache_dtype),
            network.verifier.start_from(encoded, input_length, max_length, self.cache_dtype),
        )


def begins(tokens: Int[AnyArray, "B T"], longest: int, key: Array | None) -> Int[Array, "B T"]:
    """The position of the committed token after which each position's draft begins. The drafts of a row have
    the same random length of up to `longest`, and the first one's end is random; without a key, the length is
    half of `longest`."""
    rows, position = tokens.shape[0], jnp.arange(tokens.shape[1])
    size, ahead = jnp.full((rows, 1), -(-longest // 2)), jnp.zeros((rows, 1), jnp.int32)
    if key is not None:
        shortest = min(SHORTEST, longest)
        length, phase = jax.random.uniform(jax.random.fold_in(key, DRAWN), (2, rows, 1))
        size = jnp.int32(shortest * ((longest + 1) / shortest) ** length)
        ahead = jnp.int32(phase * size)
    return jnp.maximum((position + ahead) // size * size - ahead, 0)
