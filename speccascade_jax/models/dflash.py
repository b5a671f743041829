"""DFlash's block drafters for decoder-only models (Chen et al. 2026, arXiv 2602.06036).

A drafter consists of a few layers like those of Qwen 3. They read the last committed token and a mask for
each place of the draft, which attend to each other in both directions and to keys and values made from
several verifier layers' states at the committed positions. Each mask predicts the token in its own place.
Embeddings and head are the verifier's.
"""

import dataclasses
from typing import Any, ClassVar, NoReturn

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int

from speccascade_jax.core.protocols import UNSEEN, AnyArray, Array, Prefix
from speccascade_jax.models.base import FlaxModel
from speccascade_jax.models.block_drafter import BlockDrafterCache, BlockPairModel, seen
from speccascade_jax.models.cache import DecoderCache, blank, entries, remembering, with_more
from speccascade_jax.models.decoder import Decoder, DecoderConfig, DecoderModel, Layer, Norm, read_prompts
from speccascade_jax.models.layers import AfterLayer, Linear, last_written, steps_back
from speccascade_jax.models.members import NetworkShape
from speccascade_jax.models.presets import QWEN3_8B
from speccascade_jax.models.quantization import table_rows
from speccascade_jax.models.rope import turns
from speccascade_jax.models.stacking import each_layer, layers_of, of_each_layer


@dataclasses.dataclass(frozen=True)
class DFlashConfig(DecoderConfig):
    """A drafter's shape, with the verifier's vocabulary and width. The defaults are those of Qwen 3 8B's
    drafter."""

    family: str = "dflash"
    vocab_size: int = QWEN3_8B.vocab_size
    d_ff: int = QWEN3_8B.d_ff
    num_kv_heads: int = QWEN3_8B.num_kv_heads
    num_layers: int = 5
    head_norms: bool = True
    rope_theta: float = QWEN3_8B.rope_theta
    max_positions: int = QWEN3_8B.max_positions
    norm_epsilon: float = QWEN3_8B.norm_epsilon
    pad_id: int = QWEN3_8B.pad_id
    eos_id: int = QWEN3_8B.eos_id
    bos_id: int = QWEN3_8B.bos_id
    mask_id: int = 151_669
    states: tuple[int, ...] = (2, 10, 18, 26, 34)  # numbers of verifier layers after which states are read
    block_size: int = 16  # tokens of a pass: the last committed one and the draft


DFLASH = DFlashConfig()
PRESETS = {"qwen3_8b_dflash": DFLASH}


class DFlash(nnx.Module):
    """The network of a drafter. `dtype` is that of matrix products; sums and logits are float32."""

    def __init__(self, config: DFlashConfig, *, dtype: Any, stacked: bool, rngs: nnx.Rngs):
        c, inputs = config, len(config.states) * config.d_model
        self.config = c
        layers = [Layer(c, dtype=dtype, stacked=stacked, rngs=rngs) for _ in range(c.num_layers)]
        self.layers = layers_of(layers, stacked)
        self.mix = Linear(inputs, c.d_model, std=inputs**-0.5, dtype=dtype, rngs=rngs)
        self.mix_norm, self.norm = Norm(c), Norm(c)

    def start(self, rows: int, max_length: int, dtype: Any) -> DecoderCache:
        """An empty cache in `dtype`."""
        c = self.config
        buffers = blank(self.layers, rows, c.num_kv_heads, max_length, c.d_kv, dtype)
        return DecoderCache(buffers, buffers, jnp.zeros((rows,), jnp.int32))

    def remember(self, states: Float[Array, "N B T D"], cache: DecoderCache) -> DecoderCache:
        """The cache with the keys and values of T more of the verifier's states."""
        mixed = self.mix_norm(self.mix(jnp.concatenate(list(states), axis=-1)))
        turn, _ = turns(self.config, cache.length[:, None] + jnp.arange(mixed.shape[1]))

        new = of_each_layer(self.layers, lambda layer: layer.attention.keys_and_values(mixed, turn))
        return with_more(cache, new, mixed.shape[1])

    def draft(
        self, tokens: Int[AnyArray, "B T"], verifier: Decoder, cache: DecoderCache
    ) -> tuple[Float[Array, "B T V"], DecoderCache]:
        """The logits of the token after each of `tokens`, some of which are masks, and the cache, of which
        only scratch entries change. The token after each is predicted in the next place; no other place
        attends to the one after the last."""
        tokens = jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=UNSEEN)
        count = tokens.shape[1]
        turn, _ = turns(self.config, cache.length[:, None] + jnp.arange(count))
        shown = seen(tokens, cache.length, steps_back(cache.length, count, entries(cache.keys)))

        def apply_layer(n: Any, layer: Layer, carry: Any) -> Any:
            x, *buffers = carry
            return layer(x, remembering(buffers, n, cache.length), turn, shown), *buffers

        read = jnp.where(tokens < 0, self.config.mask_id, tokens)
        begun = table_rows(verifier.embedding.get_value(), read), cache.keys, cache.values
        x, keys, values = each_layer(self.layers, apply_layer, begun)
        return verifier.logits(x[:, 1:], self.norm), cache._replace(keys=keys, values=values)


@dataclasses.dataclass(frozen=True)
class DFlashModel(FlaxModel):
    """A drafter without its verifier: it has parameters but cannot decode."""

    config: DFlashConfig

    def network(self, rngs: nnx.Rngs) -> DFlash:
        return DFlash(self.config, dtype=jnp.dtype(self.dtype), stacked=self.stacked, rngs=rngs)

    def prefill(self, *_: Any) -> NoReturn:
        raise ValueError(
            "a DFlash drafter only drafts for the verifier that it was trained with: load both, it first."
        )

    extend = roll_back = prefill


@dataclasses.dataclass(frozen=True)
class DFlashPairConfig(NetworkShape):
    """A verifier and its DFlash drafter."""

    family: ClassVar[str] = "dflash_pair"
    full_part: ClassVar[str] = "verifier"  # where the full model's parameters are
    verifier: DecoderConfig = QWEN3_8B
    drafter: DFlashConfig = DFLASH

    @property
    def full(self) -> DecoderConfig:
        return self.verifier


class DFlashPair(nnx.Module):
    """The verifier's network and the drafter's."""

    def __init__(self, config: DFlashPairConfig, *, dtype: Any, remat: bool, stacked: bool, rngs: nnx.Rngs):
        self.verifier = Decoder(config.verifier, dtype=dtype, remat=remat, stacked=stacked, rngs=rngs)
        self.drafter = DFlash(config.drafter, dtype=dtype, stacked=stacked, rngs=rngs)

    def start(self, rows: int, max_length: int, dtype: Any) -> BlockDrafterCache:
        """Both empty caches in `dtype`."""
        return BlockDrafterCache(
            *(part.start(rows, max_length, dtype) for part in (self.drafter, self.verifier))
        )

    def advance(
        self, tokens: AnyArray, cache: BlockDrafterCache, after: AfterLayer = last_written
    ) -> tuple[Array, BlockDrafterCache]:
        """The verifier's advance(). Its states become the drafter's keys and values."""
        x, features, verifier = self.verifier.advance_with_states(
            tokens, cache.verifier, self.drafter.config.states, after=after
        )
        return x, BlockDrafterCache(self.drafter.remember(features, cache.drafter), verifier)

    def draft(
        self, tokens: AnyArray, cache: BlockDrafterCache
    ) -> tuple[Float[Array, "B T V"], BlockDrafterCache]:
        """Like block_drafter.BlockDrafter.draft()."""
        logits, drafter = self.drafter.draft(tokens, self.verifier, cache.drafter)
        return logits, cache._replace(drafter=drafter)


@dataclasses.dataclass(frozen=True)
class DFlashPairModel(BlockPairModel):
    """A decoder-only model and its DFlash drafter."""

    config: DFlashPairConfig
    chunk: int = 512  # the verifier's

    @property
    def draft_size(self) -> int:
        """The number of tokens that the drafter writes in one pass."""
        return self.config.drafter.block_size - 1

    @property
    def full(self) -> DecoderModel:
        """The verifier without the drafter."""
        return DecoderModel(
            self.config.verifier, self.dtype, self.cache_dtype, self.remat, self.stacked, self.chunk
        )

    def network(self, rngs: nnx.Rngs) -> DFlashPair:
        return DFlashPair(
            self.config, dtype=jnp.dtype(self.dtype), remat=self.remat, stacked=self.stacked, rngs=rngs
        )

    def prefill(
        self,
        params: nnx.State,
        inputs: Int[AnyArray, "B S"],
        input_length: Int[AnyArray, " B"],
        max_length: int,
    ) -> tuple[Prefix, BlockDrafterCache]:
        """The verifier's prefill, which also fills the drafter's cache."""
        return read_prompts(self, params, inputs, input_length, max_length)

    def segment(
        self, cache: BlockDrafterCache, row: Int[AnyArray, ""], start: Int[AnyArray, ""], size: int
    ) -> Any:
        """The verifier's segment and the drafter's."""
        return {name: self.full.segment(part, row, start, size) for name, part in cache._asdict().items()}

    def with_segment(
        self, cache: BlockDrafterCache, segment: Any, rows: Bool[AnyArray, " B"], start: Int[AnyArray, ""]
    ) -> BlockDrafterCache:
        parts = cache._asdict().items()
        return BlockDrafterCache(
            **{name: self.full.with_segment(part, segment[name], rows, start) for name, part in parts}
        )
