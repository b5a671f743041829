"""A drafter that reads its verifier's encoder: a small T5 decoder whose cross-attention sees a projection of
the verifier's encoding, so that a source is encoded once for both.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Float, Int
from tyro.conf import Suppress

from speccascade_jax.core.protocols import AnyArray, Prefix
from speccascade_jax.models.cache import T5Cache, empty, insert_buffer, write
from speccascade_jax.models.layers import AfterLayer, Linear, last_written, make_dropout
from speccascade_jax.models.members import NetworkShape, PairModel
from speccascade_jax.models.t5 import T5, T5Config, T5Model, padding_bias

Array = jax.Array
ROUND = 4  # assumed tokens per round in training


@dataclasses.dataclass(frozen=True)
class SharedEncoderConfig(NetworkShape):
    """A verifier and a drafter without an encoder. Its fields are not flags of a training run."""

    family: ClassVar[str] = "shared_encoder"
    full_part: ClassVar[str] = "verifier"  # where the full model's parameters are
    verifier: T5Config = dataclasses.field(default_factory=T5Config)
    drafter: Suppress[T5Config] = dataclasses.field(
        default_factory=lambda: T5Config(
            d_model=256, d_ff=512, num_heads=4, num_encoder_layers=0, num_decoder_layers=1
        )
    )
    states: bool = False  # whether the drafter reads the verifier's states

    @property
    def full(self) -> T5Config:
        return self.verifier


class SharedEncoderCache(NamedTuple):
    """The caches of the two decoders."""

    drafter: T5Cache
    verifier: T5Cache
    states: Array | None = None  # [B, 1, L, D], a single row's [1, L, D]: the verifier's, if they are read

    @property
    def length(self) -> Int[Array, " B"]:
        """The larger of the two lengths."""
        return jnp.maximum(self.drafter.length, self.verifier.length)


class SharedEncoder(nnx.Module):
    """The verifier's network, the drafter's, and the projection of the verifier's encoding for the
    drafter."""

    def __init__(
        self, config: SharedEncoderConfig, *, dtype: Any, remat: bool, stacked: bool, rngs: nnx.Rngs
    ):
        self.verifier, self.drafter = (
            T5(shape, dtype=dtype, remat=remat, stacked=stacked, rngs=rngs)
            for shape in (config.verifier, config.drafter)
        )
        width = config.verifier.d_model
        self.projection = Linear(width, config.drafter.d_model, std=width**-0.5, dtype=dtype, rngs=rngs)
        self.states = (
            Linear(width, config.drafter.d_model, std=0.0, dtype=dtype, rngs=rngs) if config.states else None
        )

    def seen(self, states: Array, place: Array) -> Array | float:
        """The term that the drafter adds to its embeddings [B, T, D]: the verifier's states [B, L, D'] at
        `place` [B, T], projected, and zero at -1."""
        if self.states is None:
            return 0.0
        read = jnp.take_along_axis(states, jnp.maximum(place, 0)[..., None], axis=1)
        return jnp.where(place[..., None] >= 0, self.states(read), 0.0)


@dataclasses.dataclass(frozen=True)
class SharedEncoderModel(PairModel):
    """A network of two members, "drafter" and "verifier". Used alone it is the verifier, with the same
    initial parameters as the verifier for the same seed."""

    config: SharedEncoderConfig
    by_place: ClassVar[bool] = False  # the drafter's cache depends on the states at the time of writing

    @property
    def full(self) -> T5Model:
        """The verifier without the drafter."""
        return T5Model(self.config.verifier, self.dtype, self.cache_dtype, self.remat, self.stacked)

    @property
    def by_prefix(self) -> bool:  # type: ignore[override]
        """Whether the drafter's distribution depends only on the text, not on where the verifier's rounds
        began."""
        return not self.config.states

    def network(self, rngs: nnx.Rngs) -> SharedEncoder:
        return SharedEncoder(
            self.config, dtype=jnp.dtype(self.dtype), remat=self.remat, stacked=self.stacked, rngs=rngs
        )

    def full_pass(
        self,
        params: nnx.State,
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
        after: AfterLayer = last_written,
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B T D"]]:
        """The encoding and the states of the target. The verifier has no dropout."""
        verifier, tokens = self.merged(params).verifier, self.full.decoder_input(target)
        source_bias = padding_bias(source_length, source.shape[1])
        encoded = verifier.encode(source, source_bias)
        return encoded, verifier.decoder_norm(verifier.decode(encoded, source_bias, tokens, after=after))

    def member_logits(
        self,
        params: nnx.State,
        read: tuple[Float[Array, "B S D"], Float[Array, "B T D"]],
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T V"], ...]:
        """`key` enables dropout in the drafter. The states that it reads are those of last_read()."""
        network, tokens = self.merged(params), self.full.decoder_input(target)
        (encoded, states), drafter = read, network.drafter
        dropout = make_dropout(key, self.config.drafter.dropout_rate)
        more = network.seen(states, last_read(tokens, key))
        source_bias = padding_bias(source_length, source.shape[1])
        drafted = drafter.decode(network.projection(encoded), source_bias, tokens, dropout, more=more)
        return (
            drafter.logits(drafted, lambda x: dropout(drafter.decoder_norm(x))),
            network.verifier.logits(states, lambda x: x),
        )

    def prefill(
        self,
        params: nnx.State,
        inputs: Int[AnyArray, "B S"],
        input_length: Int[AnyArray, " B"],
        max_length: int,
    ) -> tuple[Prefix, SharedEncoderCache]:
        """Encodes the inputs once, for both members."""
        network, rows = self.merged(params), inputs.shape[0]
        encoded = network.verifier.encode(inputs, padding_bias(input_length, inputs.shape[1]))
        drafter, verifier = (
            decoder.start_from(seen, input_length, max_length, self.cache_dtype)
            for decoder, seen in ((network.drafter, network.projection(encoded)), (network.verifier, encoded))
        )
        start = jnp.full((rows, 1), self.config.pad_id, jnp.int32)
        states = (
            empty(rows, 1, max_length, self.config.verifier.d_model, self.cache_dtype)
            if self.config.states
            else None
        )
        return Prefix(start, jnp.ones((rows,), jnp.int32)), SharedEncoderCache(drafter, verifier, states)

    def lengths(self, cache: SharedEncoderCache) -> Int[Array, "B 2"]:
        return jnp.stack([decoder.length for decoder in cache[:2]], axis=1)

    def roll_back(self, cache: SharedEncoderCache, length: Int[AnyArray, " B"]) -> SharedEncoderCache:
        def shortened(decoder: T5Cache) -> T5Cache:
            return decoder._replace(length=jnp.minimum(decoder.length, length))

        return cache._replace(drafter=shortened(cache.drafter), verifier=shortened(cache.verifier))

    def insert(
        self,
        cache: SharedEncoderCache,
        fresh: SharedEncoderCache,
        slots: Int[AnyArray, " R"],
        like_fresh: bool,
    ) -> SharedEncoderCache:
        def states(old: Array | None, new: Array | None) -> Array | None:
            return None if old is None or new is None else insert_buffer(old, new, slots, like_fresh)

        return SharedEncoderCache(
            self.full.insert(cache.drafter, fresh.drafter, slots, like_fresh),
            self.full.insert(cache.verifier, fresh.verifier, slots, like_fresh),
            states(cache.states, fresh.states),
        )

    def extend_member(
        self, number: int, params: nnx.State, tokens: Int[AnyArray, "B T"], cache: SharedEncoderCache
    ) -> tuple[Float[Array, "B T V"], SharedEncoderCache]:
        network, states = self.merged(params), cache.states
        if number == 0:
            more: Array | float = 0.0
            if states is not None:  # the last state that the verifier has written, at most the one before
                position = cache.drafter.length[:, None] + jnp.arange(tokens.shape[1])
                more = network.seen(
                    states.reshape(-1, *states.shape[-2:]),
                    jnp.minimum(position, cache.verifier.length[:, None]) - 1,
                )
            x, drafter = network.drafter.advance(tokens, cache.drafter, more=more)
            return network.drafter.logits(x), cache._replace(drafter=drafter)
        x, verifier = network.verifier.advance(tokens, cache.verifier)
        if states is not None:
            states = write(states, network.verifier.decoder_norm(x)[:, None], cache.verifier.length, axis=2)
        return network.verifier.logits(x), cache._replace(verifier=verifier, states=states)


def last_read(tokens: Int[AnyArray, "B T"], key: Array | None = None) -> Int[Array, "B T"]:
    """The last position that the verifier has read when the drafter reads each of `tokens`, -1 for none.
    Rounds begin at random positions and have ROUND tokens on average; without a key, each has exactly
    ROUND."""
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    begins = position % ROUND == 0
    if key is not None:
        begins = jax.random.bernoulli(jax.random.fold_in(key, ROUND), 1 / ROUND, tokens.shape)
    return lax.cummax(jnp.where(begins, position, 0), axis=1) - 1
