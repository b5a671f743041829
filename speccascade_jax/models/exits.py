"""Early exits of one network: the first layers of a model as smaller models (LayerSkip: Elhoushi et al. 2024,
arXiv 2404.16710).

An exit reads the residual stream after some decoder layers through a norm and a head. Keys and values are
cached once: when a deeper member reads the same tokens, it overwrites the entries that an exit wrote in the
lower layers, so no exit has to catch up with a deeper one.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int

from speccascade_jax.core.nests import insert_rows
from speccascade_jax.core.protocols import AnyArray, Prefix
from speccascade_jax.models.base import Keys
from speccascade_jax.models.cache import DecoderCache, T5Cache
from speccascade_jax.models.decoder import Decoder, DecoderConfig, DecoderModel
from speccascade_jax.models.layers import AfterLayer, Linear, last_written
from speccascade_jax.models.members import FlaxNetwork, Member, NetworkShape, beneath, members
from speccascade_jax.models.t5 import T5, T5Config, T5Model

Array = jax.Array
HEADS = "shared", "norm", "adapter", "own"


@dataclasses.dataclass(frozen=True)
class ExitsConfig(NetworkShape):
    """A model and its exits.

    head: the additional parameters of each exit: none ("shared", as in LayerSkip), a norm ("norm"), a norm
    and a low-rank residual layer of `rank` ("adapter"), or a norm and a head ("own").
    """

    family: ClassVar[str] = "exits"
    full_part: ClassVar[str] = "full"  # where the full model's parameters are
    full: T5Config | DecoderConfig = dataclasses.field(default_factory=T5Config)
    layers: tuple[int, ...] = (4,)  # number of decoder layers of each exit, in ascending order
    head: str = "shared"
    rank: int = 64  # rank of adapters


def depth_of(config: Any) -> int:
    """The number of layers of a model's decoder."""
    return config.num_decoder_layers if isinstance(config, T5Config) else config.num_layers


class ExitsCache(NamedTuple):
    """The cache of a network with exits."""

    full: T5Cache | DecoderCache  # written by all members; its length is that of the longest member
    lengths: Int[Array, "B M"]  # covered by each member, the smallest first

    @property
    def length(self) -> Int[Array, " B"]:
        """The length of the longest member."""
        return jnp.max(self.lengths, axis=1)


class ExitHead(nnx.Module):
    """The parameters of a single exit. An untrained adapter has no effect."""

    def __init__(self, full: T5 | Decoder, config: ExitsConfig, *, dtype: Any, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int, std: float) -> Linear:
            return Linear(inputs, outputs, std=std, dtype=dtype, rngs=rngs)

        width, kind, adapts = config.full.d_model, config.head, config.head == "adapter"
        self.norm = None if kind == "shared" else full.new_norm()
        self.narrow = linear(width, config.rank, width**-0.5) if adapts else None
        self.widen = linear(config.rank, width, 0.0) if adapts else None
        self.head = linear(width, config.vocab_size, width**-0.5) if kind == "own" else None

    def __call__(self, x: Array, full: T5 | Decoder) -> Array:
        """The residual stream [B, T, D] -> logits [B, T, V]."""
        norm = full.final_norm if self.norm is None else self.norm

        def normed(x: Array) -> Array:
            x = norm(x)
            if self.narrow is None or self.widen is None:
                return x
            return x + self.widen(jax.nn.gelu(self.narrow(x), approximate=True))

        return full.logits(x, normed, self.head)

    def begin_as(self, full: T5 | Decoder) -> None:
        """Copies the full model's norm and head as a start for training."""
        if self.norm is not None:
            self.norm.scale[...] = full.final_norm.scale[...]
        if self.head is not None:
            self.head.kernel[...] = full.head_kernel()


class Exits(nnx.Module):
    """The full model's network and its exits'."""

    def __init__(self, config: ExitsConfig, full: T5 | Decoder, *, dtype: Any, rngs: nnx.Rngs):
        self.full = full
        self.exits = nnx.List([ExitHead(full, config, dtype=dtype, rngs=rngs) for _ in config.layers])


@dataclasses.dataclass(frozen=True)
class ExitsModel(FlaxNetwork):
    """A network whose members are its exits, named by their numbers of layers, and the full model.

    Used alone, it is the full model, and has the same initial parameters as the full model with the same
    seed.
    """

    config: ExitsConfig

    @property
    def full(self) -> Any:
        """The full model without exits."""
        kind: Any = T5Model if isinstance(self.config.full, T5Config) else DecoderModel
        return kind(self.config.full, self.dtype, self.cache_dtype, self.remat, self.stacked)

    @property
    def names(self) -> tuple[str, ...]:
        return *map(str, self.config.layers), str(depth_of(self.config.full))

    @property
    def members(self) -> tuple[Member, ...]:
        return members(self)

    def missing(self, name: str) -> str:
        depths = " and ".join(self.names[:-1])
        return (
            f"has exits after {depths} of its {self.names[-1]} layers, not after {name}: name one of "
            "these, or the folder without @ for the full model"
        )

    def network(self, rngs: nnx.Rngs) -> Exits:
        return Exits(self.config, self.full.network(rngs), dtype=jnp.dtype(self.dtype), rngs=rngs)

    def around(self, full: nnx.State, seed: int) -> nnx.State:
        """Parameters that contain the full model's `full` (the same arrays), and exits that start with its
        norm and its head."""

        def begun(full: nnx.State) -> nnx.State:
            network = self.network(Keys(seed))
            nnx.update(network.full, full)
            for head in network.exits:
                head.begin_as(network.full)
            return nnx.state(network.exits)

        return nnx.from_flat_state(beneath("full", full) | beneath("exits", jax.jit(begun)(full)))

    def full_pass(
        self,
        params: nnx.State,
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
        after: AfterLayer = last_written,
    ) -> tuple[Float[Array, "B T D"], ...]:
        """The states after each exit's layers, and the input of the full model's head. `key` enables
        dropout."""
        streams: dict[int, Array] = {}

        def kept(number: int, before: Array, new: Array) -> Array:
            streams[number + 1] = after(number, before, new)
            return streams[number + 1]

        last = self.forced_states(params, source, source_length, target, key, kept)
        return *(streams[depth] for depth in self.config.layers), last

    def member_logits(
        self,
        params: nnx.State,
        read: tuple[Float[Array, "B T D"], ...],
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T V"], ...]:
        """The heads have no dropout."""
        network, (*streams, last) = self.merged(params), read
        return (
            *(head(stream, network.full) for head, stream in zip(network.exits, streams, strict=True)),
            self.head_logits(params, last),
        )

    def prefill(
        self,
        params: nnx.State,
        inputs: Int[AnyArray, "B S"],
        input_length: Int[AnyArray, " B"],
        max_length: int,
    ) -> tuple[Prefix, ExitsCache]:
        """The full model's prefill, shared by all members."""
        prefix, cache = self.full.prefill(params["full"], inputs, input_length, max_length)
        return prefix, ExitsCache(cache, jnp.repeat(cache.length[:, None], len(self.names), axis=1))

    def lengths(self, cache: ExitsCache) -> Int[Array, "B M"]:
        return cache.lengths

    def roll_back(self, cache: ExitsCache, length: Int[AnyArray, " B"]) -> ExitsCache:
        return with_lengths(cache.full, jnp.minimum(cache.lengths, jnp.asarray(length)[:, None]))

    def insert(
        self, cache: ExitsCache, fresh: ExitsCache, slots: Int[AnyArray, " R"], like_fresh: bool
    ) -> ExitsCache:
        return ExitsCache(
            self.full.insert(cache.full, fresh.full, slots, like_fresh),
            insert_rows(cache.lengths, fresh.lengths, slots, like_fresh),
        )

    def segment(self, cache: ExitsCache, row: Int[AnyArray, ""], start: Int[AnyArray, ""], size: int) -> Any:
        """The full model's segment, which all members read."""
        return self.full.segment(cache.full, row, start, size)

    def with_segment(
        self, cache: ExitsCache, segment: Any, rows: Bool[AnyArray, " B"], start: Int[AnyArray, ""]
    ) -> ExitsCache:
        full = self.full.with_segment(cache.full, segment, rows, start)
        return with_lengths(full, jnp.where(rows[:, None], full.length[:, None], cache.lengths))

    def extend(
        self, params: nnx.State, tokens: Int[AnyArray, "B T"], cache: ExitsCache
    ) -> tuple[Float[Array, "B T V"], ExitsCache]:
        """The full model's extend()."""
        return self.extend_member(len(self.config.layers), params, tokens, cache)

    def extend_member(
        self, number: int, params: nnx.State, tokens: Int[AnyArray, "B T"], cache: ExitsCache
    ) -> tuple[Float[Array, "B T V"], ExitsCache]:
        """extend() by one member, which also writes the entries of all smaller members."""
        network, is_exit = self.merged(params), number < len(self.config.layers)
        full_cache = cache.full._replace(length=cache.lengths[:, number])
        x, full_cache = network.full.advance(
            tokens, full_cache, self.config.layers[number] if is_exit else None
        )
        logits = network.exits[number](x, network.full) if is_exit else network.full.logits(x)
        written = jnp.where(jnp.arange(cache.lengths.shape[1]) <= number, full_cache.length[:, None], 0)
        return logits, with_lengths(full_cache, jnp.maximum(cache.lengths, written))


def with_lengths(cache: T5Cache | DecoderCache, lengths: Int[Array, "B M"]) -> ExitsCache:
    return ExitsCache(cache._replace(length=jnp.max(lengths, axis=1)), lengths)
