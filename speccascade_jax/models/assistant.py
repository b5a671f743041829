"""Gemma 4's assistants: drafters that read their verifier's states and its stored keys and values.

An assistant consists of a few Gemma 4 layers that have only queries. For each token it reads the verifier's
embedding and a state: the verifier's last state or, while it drafts, its own last output. Its position stays
that of the last committed token for the whole draft. So it has no cache and no prefill of its own.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Bool, Float, Int

from speccascade_jax.core.nests import insert_rows
from speccascade_jax.core.protocols import AnyArray, Prefix
from speccascade_jax.models.base import FlaxModel
from speccascade_jax.models.cache import LocalCache, cut, empty, entries, insert_buffer, put, write
from speccascade_jax.models.decoder import MASKED, read_prompts
from speccascade_jax.models.gemma4 import GEMMA4, Gemma4, Gemma4Config, Gemma4Model, Layered, Pass, kinds_of
from speccascade_jax.models.layers import AfterLayer, Linear, last_written, project
from speccascade_jax.models.members import NetworkShape, PairModel
from speccascade_jax.models.quantization import table_rows, tied_kernel
from speccascade_jax.models.stacking import each_layer

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class AssistantConfig(Gemma4Config):
    """An assistant's shape. All of its layers are readers. The defaults are those of E2B's assistant."""

    family: ClassVar[str] = "gemma4_assistant"
    d_model: int = 256
    d_ff: int = 2048
    num_heads: int = 4
    num_layers: int = 4
    num_readers: int | None = 4
    wide_readers: bool = False
    per_layer_width: int | None = None
    logit_softcap: float | None = None
    local: tuple[int, ...] = (1, 1, 1, 0)
    state_width: int = 1536  # width of the verifier's states
    num_centroids: int | None = 2048  # clusters of equally many tokens; None: all tokens are scored
    active_centroids: int = 32  # number of most likely clusters, whose tokens are scored


ASSISTANT = AssistantConfig()
PRESETS = {
    "gemma4_e2b_assistant": ASSISTANT,
    "gemma4_e4b_assistant": dataclasses.replace(
        ASSISTANT, num_kv_heads=2, num_kv_heads_global=2, state_width=2560
    ),
    "gemma4_31b_assistant": dataclasses.replace(
        ASSISTANT,
        d_model=1024,
        d_ff=8192,
        num_heads=32,
        num_kv_heads=16,
        num_kv_heads_global=4,
        keys_are_values=True,
        window=1024,
        state_width=5376,
        num_centroids=None,
    ),
}


class Assistant(Layered):
    """The network."""

    config: AssistantConfig

    def add_layers(self, *, dtype: Any, stacked: bool, rngs: nnx.Rngs) -> None:
        super().add_layers(dtype=dtype, stacked=stacked, rngs=rngs)
        c = self.config

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, std=inputs**-0.5, dtype=dtype, rngs=rngs)

        self.begin, self.end = linear(2 * c.state_width, c.d_model), linear(c.d_model, c.state_width)
        self.centroids = None if c.num_centroids is None else linear(c.d_model, c.num_centroids)
        self.order = None if c.num_centroids is None else nnx.Variable(jnp.arange(c.vocab_size))

    def step(
        self, embedded: Array, state: Array, position: Int[Array, " B"], held: Any
    ) -> tuple[Float[Array, "B 1 V"], Array]:
        """The logits after a token whose verifier's embedding is `embedded` [B, 1, D'], and the next state
        [B, 1, D']. `position` is that of the last committed token; `held` are the keys and values before
        it."""
        size = entries(held[0])
        back = position[:, None, None] - jnp.arange(size)
        kinds = kinds_of(self.config, position[:, None], jnp.where(back > 0, back, -1))
        made = Pass(kinds, None, last_written, False)
        x = self.begin(jnp.concatenate([embedded, state], axis=-1))
        x = self.norm(each_layer(self.readers, partial(self.read, made, held), x))
        return self.scores(x), self.end(x)

    def scores(self, x: Array) -> Float[Array, "B T V"]:
        """The logits of x [B, T, D]. Only tokens of the most likely centroids are scored; others get no
        mass."""
        table = self.embedding.get_value()
        if self.centroids is None or self.order is None:
            return project(x, tied_kernel(table), self.dtype)
        c, rows = self.config, jnp.arange(x.shape[0])[:, None, None]
        _, chosen = lax.top_k(self.centroids(x), c.active_centroids)
        tokens = self.order[...].reshape(c.num_centroids, -1)[chosen].reshape(*x.shape[:2], -1)
        logits = jnp.einsum("btd,btnd->btn", x, table_rows(table, tokens))
        blank = jnp.full((*x.shape[:2], c.vocab_size), MASKED)
        return blank.at[rows, jnp.arange(x.shape[1])[:, None], tokens].set(logits)


@dataclasses.dataclass(frozen=True)
class AssistantModel(FlaxModel):
    """An assistant without its verifier: it has parameters but cannot decode."""

    config: AssistantConfig

    def network(self, rngs: nnx.Rngs) -> Assistant:
        return Assistant(
            self.config, dtype=jnp.dtype(self.dtype), remat=self.remat, stacked=self.stacked, rngs=rngs
        )

    def prefill(self, *_: Any) -> NoReturn:
        raise ValueError(
            "an assistant only drafts for the Gemma 4 that it was trained with: load both, it first."
        )

    extend = roll_back = prefill


@dataclasses.dataclass(frozen=True)
class AssistedConfig(NetworkShape):
    """A verifier and its assistant."""

    family: ClassVar[str] = "assisted"
    full_part: ClassVar[str] = "verifier"  # where the full model's parameters are
    verifier: Gemma4Config = GEMMA4
    drafter: AssistantConfig = ASSISTANT

    @property
    def full(self) -> Gemma4Config:
        return self.verifier


class AssistedCache(NamedTuple):
    """The verifier's cache, and the states. Entries at or past the lengths are scratch."""

    verifier: LocalCache
    states: Array  # [B, 1, L, D], a single row's [1, L, D]: the verifier's, past its length the assistant's
    drafted: Int[Array, " B"]  # number of positions that have a state

    @property
    def length(self) -> Int[Array, " B"]:
        return self.drafted


class Assisted(nnx.Module):
    """The verifier's network and the assistant's."""

    def __init__(self, config: AssistedConfig, *, dtype: Any, remat: bool, stacked: bool, rngs: nnx.Rngs):
        fields: dict[str, Any] = {"dtype": dtype, "remat": remat, "stacked": stacked, "rngs": rngs}
        self.verifier, self.drafter = Gemma4(config.verifier, **fields), Assistant(config.drafter, **fields)

    def start(self, rows: int, max_length: int, dtype: Any) -> AssistedCache:
        """An empty cache in `dtype`."""
        states = empty(rows, 1, max_length, self.verifier.config.d_model, dtype)
        return AssistedCache(
            self.verifier.start(rows, max_length, dtype), states, jnp.zeros((rows,), jnp.int32)
        )

    def advance(
        self, tokens: AnyArray, cache: AssistedCache, after: AfterLayer = last_written
    ) -> tuple[Array, AssistedCache]:
        """The verifier's advance(). Its states replace the assistant's."""
        start = cache.verifier.length
        x, verifier = self.verifier.advance(tokens, cache.verifier, after)
        states = write(cache.states, self.verifier.norm(x)[:, None], start, axis=2)
        return x, AssistedCache(verifier, states, jnp.maximum(cache.drafted, verifier.length))

    def draft(self, tokens: AnyArray, cache: AssistedCache) -> tuple[Float[Array, "B T V"], AssistedCache]:
        """The assistant's logits after each of `tokens`, one at a time: each needs the state before it."""
        held, position = self.verifier.last(cache.verifier), cache.verifier.length

        def read(carry: Any, token: Array) -> tuple[Any, Array]:
            states, drafted = carry
            rows = states.reshape(-1, *states.shape[-2:])
            before = jnp.maximum(drafted - 1, 0)[:, None, None]
            state = jnp.where(drafted[:, None, None] > 0, jnp.take_along_axis(rows, before, axis=1), 0)
            logits, state = self.drafter.step(
                self.verifier.embed(token[:, None]), state.astype(jnp.float32), position, held
            )
            return (write(states, state[:, None], drafted, axis=2), drafted + 1), logits[:, 0]

        (states, drafted), logits = lax.scan(read, (cache.states, cache.drafted), jnp.swapaxes(tokens, 0, 1))
        return jnp.swapaxes(logits, 0, 1), cache._replace(states=states, drafted=drafted)


@dataclasses.dataclass(frozen=True)
class AssistedModel(PairModel):
    """A network of two members, "drafter" (the assistant) and "verifier". Used alone it is the verifier."""

    config: AssistedConfig
    chunk: int = 512  # the verifier's
    drafter_name: ClassVar[str] = "an assistant"

    @property
    def full(self) -> Gemma4Model:
        """The verifier without the assistant."""
        return Gemma4Model(
            self.config.verifier, self.dtype, self.cache_dtype, self.remat, self.stacked, self.chunk
        )

    def network(self, rngs: nnx.Rngs) -> Assisted:
        return Assisted(
            self.config, dtype=jnp.dtype(self.dtype), remat=self.remat, stacked=self.stacked, rngs=rngs
        )

    def prefill(
        self,
        params: nnx.State,
        inputs: Int[AnyArray, "B S"],
        input_length: Int[AnyArray, " B"],
        max_length: int,
    ) -> tuple[Prefix, AssistedCache]:
        """The verifier's prefill. The assistant needs none."""
        return read_prompts(self, params, inputs, input_length, max_length)

    def lengths(self, cache: AssistedCache) -> Int[Array, "B 2"]:
        return jnp.stack([cache.drafted, cache.verifier.length], axis=1)

    def roll_back(self, cache: AssistedCache, length: Int[AnyArray, " B"]) -> AssistedCache:
        verifier = cache.verifier._replace(length=jnp.minimum(cache.verifier.length, length))
        return cache._replace(verifier=verifier, drafted=jnp.minimum(cache.drafted, length))

    def insert(
        self, cache: AssistedCache, fresh: AssistedCache, slots: Int[AnyArray, " R"], like_fresh: bool
    ) -> AssistedCache:
        return AssistedCache(
            self.full.insert(cache.verifier, fresh.verifier, slots, like_fresh),
            insert_buffer(cache.states, fresh.states, slots, like_fresh),
            insert_rows(cache.drafted, fresh.drafted, slots, like_fresh),
        )

    def segment(
        self, cache: AssistedCache, row: Int[AnyArray, ""], start: Int[AnyArray, ""], size: int
    ) -> Any:
        """The verifier's segment and its states."""
        held = self.full.segment(cache.verifier, row, start, size)
        return {**held, "states": cut(cache.states, row, start, size)}

    def with_segment(
        self, cache: AssistedCache, segment: Any, rows: Bool[AnyArray, " B"], start: Int[AnyArray, ""]
    ) -> AssistedCache:
        verifier = self.full.with_segment(cache.verifier, segment, rows, start)
        drafted = jnp.where(rows, verifier.length, cache.drafted)
        return AssistedCache(verifier, put(cache.states, segment["states"], rows, start), drafted)
