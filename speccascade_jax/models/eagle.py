"""EAGLE-3 heads: drafters of one layer that read their verifier's states (Li et al. 2025, arXiv 2503.01840).

A head predicts the next token from a token's embedding and a feature of the text before it. For committed
tokens, the feature is a projection of three of the verifier's states of the token before; while the head
drafts, it is the head's last output. The head has its own keys and values. Its logits may cover only frequent
tokens; all others get no mass.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Bool, Float, Int
from tyro.conf import Suppress

from speccascade_jax.core.nests import insert_rows
from speccascade_jax.core.protocols import AnyArray, Prefix
from speccascade_jax.models.base import FlaxModel
from speccascade_jax.models.cache import DecoderCache, cut, empty, entries, insert_buffer, put, write
from speccascade_jax.models.decoder import (
    MASKED,
    Attention,
    Decoder,
    DecoderConfig,
    DecoderModel,
    FeedForward,
    Norm,
    Remember,
    forced_inputs,
    in_chunks,
    read_prompts,
)
from speccascade_jax.models.layers import AfterLayer, Linear, last_written, steps_back
from speccascade_jax.models.members import NetworkShape, PairModel
from speccascade_jax.models.presets import LLAMA3_8B, QWEN3_8B
from speccascade_jax.models.quantization import table_rows
from speccascade_jax.models.rope import Turn, turns

Array = jax.Array
USUAL_STATES = 3  # number of verifier states that a feature is a projection of


@dataclasses.dataclass(frozen=True)
class EagleConfig(DecoderConfig):
    """A head's shape, with the verifier's vocabulary. The defaults are those of Llama 3.1 8B's head."""

    family: str = "eagle3"
    vocab_size: int = 128_256
    d_ff: int = 14_336
    num_kv_heads: int = 8
    num_layers: int = 1
    max_positions: int = 2048
    draft_vocab_size: int = 32_000  # number of tokens that it can draft
    state_width: int = 4096  # width of the verifier's states
    layers: tuple[int, ...] = ()  # verifier layers whose input states are read; (): usual_layers()
    own_embedding: bool = False  # otherwise it uses the verifier's embedding
    norm_before_residual: bool = False  # the residual stream begins with the normalised feature

    @property
    def num_states(self) -> int:
        return len(self.layers) or USUAL_STATES


EAGLE = EagleConfig()
PRESETS = {
    "llama3_8b_eagle3": dataclasses.replace(
        EAGLE, pad_id=LLAMA3_8B.pad_id, eos_id=LLAMA3_8B.eos_id, bos_id=LLAMA3_8B.bos_id
    ),
    "qwen3_8b_eagle3": dataclasses.replace(
        EAGLE,
        vocab_size=QWEN3_8B.vocab_size,
        d_ff=QWEN3_8B.d_ff,
        rope_theta=QWEN3_8B.rope_theta,
        max_positions=QWEN3_8B.max_positions,
        norm_epsilon=QWEN3_8B.norm_epsilon,
        pad_id=QWEN3_8B.pad_id,
        eos_id=QWEN3_8B.eos_id,
        bos_id=QWEN3_8B.bos_id,
    ),
}


def usual_layers(depth: int) -> tuple[int, ...]:
    """The layers whose input states heads read by default from a verifier with `depth` layers."""
    return 2, depth // 2, depth - 3


LLAMA3_8B_HEAD = dataclasses.replace(PRESETS["llama3_8b_eagle3"], layers=usual_layers(LLAMA3_8B.num_layers))


class EagleLayer(nnx.Module):
    """A decoder layer whose attention reads a token's embedding concatenated with its feature."""

    def __init__(self, config: EagleConfig, *, dtype: Any, stacked: bool, rngs: nnx.Rngs):
        c = config
        self.embedding_norm, self.feature_norm, self.mlp_norm = Norm(c), Norm(c), Norm(c)
        self.attention = Attention(c, width=2 * c.d_model, dtype=dtype, stacked=stacked, rngs=rngs)
        self.mlp = FeedForward(c, dtype=dtype, rngs=rngs)
        self.norm_before_residual = c.norm_before_residual

    def read(self, embedded: Array, feature: Array) -> Array:
        """The attention's input [B, T, 2 D]."""
        return jnp.concatenate([self.embedding_norm(embedded), self.feature_norm(feature)], axis=-1)

    def __call__(self, embedded: Array, feature: Array, remember: Remember, turn: Turn, mask: Array) -> Array:
        """[B, T, D] from embeddings and features [B, T, D]; other arguments are as in Attention."""
        x = self.feature_norm(feature) if self.norm_before_residual else feature
        x = x + self.attention(self.read(embedded, feature), remember, turn, mask)
        return x + self.mlp(self.mlp_norm(x))


class Eagle(nnx.Module):
    """The network of a head. `dtype` is that of matrix products; sums and logits are float32. `stacked`:
    whether the verifier's layers are stacked; the head has only one."""

    def __init__(self, config: EagleConfig, *, dtype: Any, stacked: bool, rngs: nnx.Rngs):
        c = config

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, std=inputs**-0.5, dtype=dtype, rngs=rngs)

        def table() -> nnx.Param:
            return nnx.Param(c.d_model**-0.5 * jax.random.normal(rngs.params(), (c.vocab_size, c.d_model)))

        self.config = c
        self.embedding = table() if c.own_embedding else None
        self.projection = linear(c.num_states * c.state_width, c.d_model)
        self.layer = EagleLayer(c, dtype=dtype, stacked=stacked, rngs=rngs)
        self.norm = Norm(c)
        self.head = linear(c.d_model, c.draft_vocab_size)
        self.offsets = (  # token id - index in the head's logits
            None
            if c.draft_vocab_size == c.vocab_size
            else nnx.Variable(jnp.zeros((c.draft_vocab_size,), jnp.int32))
        )

    def features(self, states: Float[Array, "N B T S"]) -> Float[Array, "B T D"]:
        """The projection of the verifier's states."""
        return self.projection(jnp.concatenate(list(states), axis=-1))

    def turn(self, place: Int[Array, "B T"]) -> Turn:
        """The rotation of tokens at `place` [B, T]. A head counts from the second token of a text."""
        return turns(self.config, place - 1)[0]

    def scores(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The logits of the layer's output; tokens that cannot be drafted get no mass."""
        logits = self.head(self.norm(x))
        if self.offsets is None:
            return logits
        blank = jnp.full((*x.shape[:2], self.config.vocab_size), MASKED)
        return blank.at[..., self.targets()].set(logits, unique_indices=True)

    def targets(self) -> Int[Array, " N"]:
        """The tokens that can be drafted."""
        numbers = jnp.arange(self.config.draft_vocab_size)
        return numbers if self.offsets is None else numbers + self.offsets[...]


@dataclasses.dataclass(frozen=True)
class EagleModel(FlaxModel):
    """A head without its verifier: it has parameters but cannot decode."""

    config: EagleConfig

    def network(self, rngs: nnx.Rngs) -> Eagle:
        return Eagle(self.config, dtype=jnp.dtype(self.dtype), stacked=self.stacked, rngs=rngs)

    def prefill(self, *_: Any) -> NoReturn:
        raise ValueError(
            "an EAGLE-3 head only drafts for the verifier that it was trained with: load both, it first."
        )

    extend = roll_back = prefill


@dataclasses.dataclass(frozen=True)
class EaglePairConfig(NetworkShape):
    """A verifier and its EAGLE-3 head, whose fields are not flags of a training run."""

    family: ClassVar[str] = "eagle3_pair"
    learns_ahead: ClassVar[bool] = True
    full_part: ClassVar[str] = "verifier"  # where the full model's parameters are
    verifier: DecoderConfig = LLAMA3_8B
    drafter: Suppress[EagleConfig] = LLAMA3_8B_HEAD

    @property
    def full(self) -> DecoderConfig:
        return self.verifier


OF_THE_HEAD = "keys", "values", "features"  # the head's parts of the cache


class EagleCache(NamedTuple):
    """The verifier's cache, and the head's. Entries at or past the lengths are scratch."""

    verifier: DecoderCache
    keys: Array  # [B, H_kv, L, K], a single row's [H_kv, L, K]: the head's, rotated to their positions
    values: Array
    features: Array  # [B, 1, L, D], a single row's [1, L, D]; past the verifier's length the head's outputs
    drafted: Int[Array, " B"]  # number of positions that the head covers

    @property
    def length(self) -> Int[Array, " B"]:
        return self.drafted


def features_before(features: Array, place: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """The features of the tokens before `place`, from EagleCache.features; zero before the first."""
    rows = features.reshape(-1, *features.shape[-2:])
    feature = jnp.take_along_axis(rows, jnp.maximum(place - 1, 0)[..., None], axis=1)
    return jnp.where(place[..., None] > 0, feature, 0).astype(jnp.float32)


class EaglePair(nnx.Module):
    """The verifier's network and the head's."""

    def __init__(self, config: EaglePairConfig, *, dtype: Any, remat: bool, stacked: bool, rngs: nnx.Rngs):
        self.verifier = Decoder(config.verifier, dtype=dtype, remat=remat, stacked=stacked, rngs=rngs)
        self.drafter = Eagle(config.drafter, dtype=dtype, stacked=stacked, rngs=rngs)

    def start(self, rows: int, max_length: int, dtype: Any) -> EagleCache:
        """An empty cache in `dtype`."""
        c = self.drafter.config
        buffer = empty(rows, c.num_kv_heads, max_length, c.d_kv, dtype)
        features = empty(rows, 1, max_length, c.d_model, dtype)
        verifier = self.verifier.start(rows, max_length, dtype)
        return EagleCache(verifier, buffer, buffer, features, jnp.zeros((rows,), jnp.int32))

    def embed(self, tokens: AnyArray) -> Float[Array, "B T D"]:
        """The head's embeddings, never scaled."""
        table = self.verifier.embedding if self.drafter.embedding is None else self.drafter.embedding
        return table_rows(table.get_value(), tokens)

    def advance(
        self, tokens: AnyArray, cache: EagleCache, after: AfterLayer = last_written
    ) -> tuple[Array, EagleCache]:
        """The verifier's advance(). Features from its states replace the head's outputs, and the head's keys
        and values are computed from the features of the preceding tokens."""
        x, states, verifier = self.verifier.advance_with_states(
            tokens, cache.verifier, self.drafter.config.layers, after=after
        )
        cache = self.remember(tokens, states, cache)
        drafted = jnp.maximum(cache.drafted, verifier.length)
        return x, cache._replace(verifier=verifier, drafted=drafted)

    def remember(
        self, tokens: Int[AnyArray, "B T"], states: Float[Array, "N B T S"], cache: EagleCache
    ) -> EagleCache:
        """Writes the features of tokens, and the head's keys and values, at the verifier's length."""
        start, drafter = cache.verifier.length, self.drafter
        features = write(cache.features, drafter.features(states)[:, None], start, axis=2)
        place = start[:, None] + jnp.arange(tokens.shape[1])
        read = drafter.layer.read(self.embed(tokens), features_before(features, place))
        keys, values = drafter.layer.attention.keys_and_values(read, drafter.turn(place))
        return cache._replace(
            keys=write(cache.keys, keys, start, axis=2),
            values=write(cache.values, values, start, axis=2),
            features=features,
        )

    def draft(self, tokens: AnyArray, cache: EagleCache) -> tuple[Float[Array, "B T V"], EagleCache]:
        """The head's logits after each of `tokens`, one at a time, because each needs the output before it.
        The first token of a text has no feature, so no other token attends to it."""
        drafter, size = self.drafter, entries(cache.keys)

        def read(cache: EagleCache, token: Array) -> tuple[EagleCache, Array]:
            start, place, held = cache.drafted, cache.drafted[:, None], [cache.keys, cache.values]

            def remember(*new: Array) -> tuple[Array, ...]:
                held[:] = (write(old, x, start, axis=2) for old, x in zip(held, new, strict=True))
                return tuple(held)

            seen = (jnp.arange(size) > 0) | (place == 0)[..., None]
            x = drafter.layer(
                self.embed(token[:, None]),
                features_before(cache.features, place),
                remember,
                drafter.turn(place),
                (steps_back(start, 1, size) >= 0) & seen,
            )
            features = write(cache.features, x[:, None], start, axis=2)
            cache = EagleCache(cache.verifier, held[0], held[1], features, start + 1)
            return cache, drafter.scores(x)[:, 0]

        cache, logits = lax.scan(read, cache, jnp.swapaxes(tokens, 0, 1))
        return jnp.swapaxes(logits, 0, 1), cache

    def draft_forced(
        self, tokens: Int[AnyArray, "B T"], begin: Int[Array, " B"], cache: EagleCache, ahead: int
    ) -> tuple[Float[Array, "B T V"], ...]:
        """The head's logits after each of `tokens`, which begin at `begin` and which the verifier has read.
        The n-th of `ahead` entries is for drafts that began n tokens before, or at the first of the tokens
        (training-time test)."""
        drafter, place = self.drafter, begin[:, None] + jnp.arange(tokens.shape[1])
        embedded, turn, column = self.embed(tokens), drafter.turn(place), jnp.arange(tokens.shape[1])
        held = [[x.reshape(-1, *x.shape[-3:])] for x in (cache.keys, cache.values)]
        key = jnp.arange(entries(cache.keys))
        seen, back = (key > 0) | (place == 0)[..., None], place[..., None] - key
        feature, scores = features_before(cache.features, place), list[Array]()
        x = jnp.zeros_like(feature)
        for step in range(ahead):

            def remember(*new: Array, step: int = step) -> tuple[Array, ...]:
                for buffers, entry in zip(held, new, strict=True):
                    buffers.extend([entry] if step else [])
                return tuple(jnp.concatenate(buffers, axis=2) for buffers in held)

            masks = [(back >= step) & seen]
            for drafted in range(1, step + 1):  # of each earlier token, as drafted
                diagonal = column[:, None] - step + drafted == column
                masks.append(jnp.broadcast_to(diagonal, (*place.shape, len(column))))
            new = drafter.layer(embedded, feature, remember, turn, jnp.concatenate(masks, axis=-1))
            x = jnp.where((column >= step)[:, None], new, x)
            scores.append(drafter.scores(x))
            feature = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return tuple(scores)


@dataclasses.dataclass(frozen=True)
class EaglePairModel(PairModel):
    """A network of two members, "drafter" (the head) and "verifier". Used alone it is the verifier."""

    config: EaglePairConfig
    chunk: int = 512  # the verifier's
    drafter_name: ClassVar[str] = "an EAGLE-3 head"

    @property
    def full(self) -> DecoderModel:
        """The verifier without the head."""
        return DecoderModel(
            self.config.verifier, self.dtype, self.cache_dtype, self.remat, self.stacked, self.chunk
        )

    def network(self, rngs: nnx.Rngs) -> EaglePair:
        return EaglePair(
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
    ) -> tuple[Float[Array, "B N L W"], Float[Array, "B T D"]]:
        """The states of the prompt and the target that the head reads, L = S + T, and the input of the
        verifier's head. There is no dropout, so `key` is ignored."""
        verifier, layers = self.merged(params).verifier, self.config.drafter.layers
        rows, size = source.shape[0], source.shape[1] + target.shape[1]

        def advance(tokens: AnyArray, carry: Any) -> tuple[Array, Any]:
            cache, kept = carry
            x, states, longer = verifier.advance_with_states(tokens, cache, layers, after=after)
            return x, (longer, write(kept, jnp.moveaxis(states, 0, 1), cache.length, axis=2))

        kept = jnp.zeros((rows, len(layers), size, self.config.drafter.state_width))
        begun = verifier.start(rows, size, self.cache_dtype), kept
        cache, kept = in_chunks(advance, source, begun, self.chunk)
        begin, tokens = forced_inputs(source, source_length, target)
        x, (_, kept) = advance(tokens, (cache._replace(length=begin), kept))
        return kept, verifier.final_norm(x)

    def member_logits(
        self,
        params: nnx.State,
        read: tuple[Float[Array, "B N L W"], Float[Array, "B T D"]],
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
        ahead: int = 1,
    ) -> tuple[Float[Array, "B T V"], ...]:
        """The head's logits for drafts that began 0 .. `ahead` - 1 tokens before, and the verifier's without
        the tokens that the head cannot draft. There is no dropout, so `key` is ignored."""
        network, (states, last) = self.merged(params), read
        begin, tokens = forced_inputs(source, source_length, target)
        text = write(jnp.pad(source, ((0, 0), (0, tokens.shape[1]))), tokens, begin)
        cache = network.start(*text.shape, self.cache_dtype)
        cache = network.remember(text, jnp.moveaxis(states, 1, 0), cache)
        can = jnp.zeros(self.vocab_size, bool).at[network.drafter.targets()].set(True)
        return (
            *network.draft_forced(tokens, begin, cache, ahead),
            jnp.where(can, network.verifier.logits(last, lambda x: x), MASKED),
        )

    def prefill(
        self,
        params: nnx.State,
        inputs: Int[AnyArray, "B S"],
        input_length: Int[AnyArray, " B"],
        max_length: int,
    ) -> tuple[Prefix, EagleCache]:
        """The verifier's prefill, which also fills the head's cache."""
        return read_prompts(self, params, inputs, input_length, max_length)

    def lengths(self, cache: EagleCache) -> Int[Array, "B 2"]:
        return jnp.stack([cache.drafted, cache.verifier.length], axis=1)

    def roll_back(self, cache: EagleCache, length: Int[AnyArray, " B"]) -> EagleCache:
        verifier = cache.verifier._replace(length=jnp.minimum(cache.verifier.length, length))
        return cache._replace(verifier=verifier, drafted=jnp.minimum(cache.drafted, length))

    def insert(
        self, cache: EagleCache, fresh: EagleCache, slots: Int[AnyArray, " R"], like_fresh: bool
    ) -> EagleCache:
        return EagleCache(
            self.full.insert(cache.verifier, fresh.verifier, slots, like_fresh),
            insert_buffer(cache.keys, fresh.keys, slots, like_fresh),
            insert_buffer(cache.values, fresh.values, slots, like_fresh),
            insert_buffer(cache.features, fresh.features, slots, like_fresh),
            insert_rows(cache.drafted, fresh.drafted, slots, like_fresh),
        )

    def segment(self, cache: EagleCache, row: Int[AnyArray, ""], start: Int[AnyArray, ""], size: int) -> Any:
        """The verifier's segment, the head's keys and values, and the features."""
        held = {name: cut(getattr(cache, name), row, start, size) for name in OF_THE_HEAD}
        return {"verifier": self.full.segment(cache.verifier, row, start, size), **held}

    def with_segment(
        self, cache: EagleCache, segment: Any, rows: Bool[AnyArray, " B"], start: Int[AnyArray, ""]
    ) -> EagleCache:
        verifier = self.full.with_segment(cache.verifier, segment["verifier"], rows, start)
        held = {name: put(getattr(cache, name), segment[name], rows, start) for name in OF_THE_HEAD}
        drafted = jnp.where(rows, verifier.length, cache.drafted)
        return EagleCache(verifier, drafted=drafted, **held)
