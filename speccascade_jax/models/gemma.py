"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118) in Flax NNX.

`Gemma` is the network; `GemmaModel` is the LanguageModel the decoding core sees.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Float, Int

from speccascade_jax.core.typing import AnyArray, Prefix, insert_rows
from speccascade_jax.models.cache import GemmaCache, empty, insert_buffer, write
from speccascade_jax.models.layers import (
    AfterLayer,
    Branches,
    Linear,
    last_written,
    project,
    read_branches,
    shift_right,
    skeleton,
    steps_back,
    with_kept,
)
from speccascade_jax.models.quantization import table_rows, tied_kernel

Array = jax.Array
MASKED = -1e9  # finite: a fully masked row must give numbers, not NaN


@dataclasses.dataclass(frozen=True)
class GemmaConfig:
    """A Gemma 2's shape. The defaults are those of 2b."""

    family: ClassVar[str] = "gemma2"
    tied_embeddings: ClassVar[bool] = True
    vocab_size: int = 256_000
    d_model: int = 2304
    d_kv: int = 256
    d_ff: int = 9216
    num_heads: int = 8
    num_kv_heads: int = 4
    num_layers: int = 26
    window: int = 4096             # of the even layers: a token sees itself and window - 1 before it
    query_scalar: int = 256    # attention scores are divided by its root
    attention_softcap: float | None = 50.0
    logit_softcap: float | None = 30.0
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    pad_id: int = 0
    eos_id: int = 1
    bos_id: int = 2


PRESETS = {
    "gemma2_2b": GemmaConfig(),
    "gemma2_9b": GemmaConfig(d_model=3584, d_ff=14336, num_heads=16, num_kv_heads=8, num_layers=42),
    "gemma2_27b": GemmaConfig(d_model=4608, d_kv=128, d_ff=36864, num_heads=32, num_kv_heads=16,
                              num_layers=46, query_scalar=144),
}


def softcap(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap): the identity near 0, never beyond +-cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rotate(x: Array, positions: Array, theta: float) -> Array:
    """Rotary position embedding (Su et al. 2021): x [B, H, T, K] at positions [B, T].

    The pair (x[i], x[i + K/2]) turns by positions * theta^(-2i/K).
    """
    half = x.shape[-1] // 2
    frequencies = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angle = (positions[..., None] * frequencies)[:, None]  # [B, 1, T, K/2]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Norm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * (1 + scale): as stored in checkpoints, scale is around 0."""

    def __init__(self, config: GemmaConfig):
        self.scale = nnx.Param(jnp.zeros((config.d_model,)))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: Array) -> Array:
        norm = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        return x * norm * (1.0 + self.scale[...].astype(jnp.float32))


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions and capped scores."""

    def __init__(self, config: GemmaConfig, *, dtype: Any, rngs: nnx.Rngs):
        c = config
        std, inner = c.d_model**-0.5, c.num_heads * c.d_kv
        self.query = Linear(c.d_model, inner, std=std, dtype=dtype, rngs=rngs)
        self.key = Linear(c.d_model, c.num_kv_heads * c.d_kv, std=std, dtype=dtype, rngs=rngs)
        self.value = Linear(c.d_model, c.num_kv_heads * c.d_kv, std=std, dtype=dtype, rngs=rngs)
        self.out = Linear(inner, c.d_model, std=inner**-0.5, dtype=dtype, rngs=rngs)
        self.config = c

    def _heads(self, x: Array) -> Array:
        """[B, T, H K] -> [B, H, T, K]"""
        return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, self.config.d_kv), 1, 2)

    def __call__(self, x: Array, keys: Array, values: Array, start: Array, positions: Array, mask: Array
                 ) -> tuple[Array, Array, Array]:
        """x [B, T, D] at `positions` [B, T]; keys and values [B, H, L, K] are written from `start` [B]
        on and attended to where `mask` [B, T, L]. Returns the output and the longer buffers."""
        c = self.config
        keys = write(keys, rotate(self._heads(self.key(x)), positions, c.rope_theta), start, axis=2)
        values = write(values, self._heads(self.value(x)), start, axis=2)
        query = rotate(self._heads(self.query(x)), positions, c.rope_theta) * c.query_scalar**-0.5
        groups = query.reshape(query.shape[0], c.num_kv_heads, -1, c.d_kv)  # [B, H_kv, R T, K]
        scores = softcap(with_kept("...tk,...lk->...tl", groups, keys), c.attention_softcap)
        by_query = scores.reshape(*scores.shape[:2], -1, *mask.shape[1:])  # [B, H_kv, R, T, L]
        masked = jnp.where(mask[:, None, None], by_query, MASKED)
        weights = jax.nn.softmax(masked, axis=-1).reshape(scores.shape)
        mixed = with_kept("...tl,...lk->...tk", weights, values)
        mixed = jnp.swapaxes(mixed.reshape(query.shape), 1, 2).reshape(*x.shape[:-1], -1)
        return self.out(mixed), keys, values


class FeedForward(nnx.Module):
    """GeGLU (Shazeer 2020): (gelu(x W0) * (x W1)) Wo."""

    def __init__(self, config: GemmaConfig, *, dtype: Any, rngs: nnx.Rngs):
        c, std = config, config.d_model**-0.5
        self.gate = Linear(c.d_model, c.d_ff, std=std, dtype=dtype, rngs=rngs)
        self.up = Linear(c.d_model, c.d_ff, std=std, dtype=dtype, rngs=rngs)
        self.down = Linear(c.d_ff, c.d_model, std=c.d_ff**-0.5, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(jax.nn.gelu(self.gate(x), approximate=True) * self.up(x))


class Layer(nnx.Module):
    def __init__(self, config: GemmaConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.attention_norm, self.attention_post_norm = Norm(config), Norm(config)
        self.mlp_norm, self.mlp_post_norm = Norm(config), Norm(config)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp = FeedForward(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array, *rest: Array) -> tuple[Array, Array, Array]:
        mixed, keys, values = self.attention(self.attention_norm(x), *rest)
        x = x + self.attention_post_norm(mixed)
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x))), keys, values


class Gemma(nnx.Module):
    """The network. `dtype` is the matrix products'; sums and logits are float32."""

    def __init__(self, config: GemmaConfig, *, dtype: Any = jnp.float32, remat: bool = False, rngs: nnx.Rngs):
        c = config
        self.config, self.dtype, self.remat = c, jnp.dtype(dtype), remat
        self.embedding = nnx.Param(
            c.d_model**-0.5 * jax.random.normal(rngs.params(), (c.vocab_size, c.d_model)))
        self.layers = nnx.List([Layer(c, dtype=dtype, rngs=rngs) for _ in range(c.num_layers)])
        self.norm = Norm(c)

    def new_norm(self) -> Norm:
        return Norm(self.config)

    @property
    def final_norm(self) -> Norm:
        return self.norm

    def head_kernel(self) -> Array:
        """[D, V]: what a linear head is that gives the logits, but for their cap."""
        return self.embedding[...].T

    def advance(self, tokens: AnyArray, cache: GemmaCache, depth: int | None = None,
                after: AfterLayer = last_written, branches: Branches | None = None
                ) -> tuple[Array, GemmaCache]:
        """The output [B, T, D] of layer `depth`, by default the last, for each of `tokens` [B, T], fed at
        cache.length, in a row or as branches; the layers above write nothing."""
        table = self.embedding.get_value()
        scale = jnp.sqrt(jnp.float32(self.config.d_model)).astype(self.norm.scale.dtype)  # as in training
        x = table_rows(table, tokens) * scale.astype(jnp.float32)
        count = tokens.shape[1]
        positions = cache.length[:, None] + (jnp.arange(count) if branches is None else branches.depth - 1)
        back = steps_back(cache.length, count, cache.keys[0].shape[-2], branches)  # [B, T, L]
        everything = back >= 0
        masks = everything & (back < self.config.window), everything
        keys, values = list(cache.keys), list(cache.values)
        for n, layer in enumerate(self.layers[:depth]):
            def call(x, k, v, layer=layer, mask=masks[n % 2]):
                return layer(x, k, v, cache.length, positions, mask)

            call = jax.checkpoint(call) if self.remat else call
            new, keys[n], values[n] = call(x, cache.keys[n], cache.values[n])
            x = after(n, x, new)
        return x, GemmaCache(tuple(keys), tuple(values), cache.length + tokens.shape[1])

    def logits(self, x: Array, norm: Callable[[Array], Array] | None = None, head: Linear | None = None,
               table: Any = None) -> Array:
        """[B, T, D] -> [B, T, V], from the embedding, capped; a norm and a head may stand for the own
        ones, or a kernel [D, I] for the embedding."""
        x = self.norm(x) if norm is None else norm(x)
        table = tied_kernel(self.embedding.get_value()) if table is None else table
        return softcap(project(x, table, self.dtype) if head is None else head(x), self.config.logit_softcap)


@dataclasses.dataclass(frozen=True)
class GemmaModel:
    """A Gemma 2 as the decoding core's LanguageModel: static and hashable, parameters passed in."""

    config: GemmaConfig
    dtype: str = "float32"        # of the matrix products; int8 where their kernels are packed so
    cache_dtype: str = "float32"  # of remembered keys and values: CPUs attend faster in float32
    remat: bool = False           # recompute each layer in the backward pass
    chunk: int = 512              # prompts are read so many tokens at a time: bounds the scores' memory

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def network(self, rngs: nnx.Rngs) -> Gemma:
        return Gemma(self.config, dtype=jnp.dtype(self.dtype), remat=self.remat, rngs=rngs)

    def graphdef(self) -> nnx.GraphDef:
        return skeleton(self)[0]

    def init(self, seed: int) -> nnx.State:
        """Fresh parameters: every layer's input and output, and the logits, of unit variance."""
        return nnx.split(self.network(nnx.Rngs(seed)))[1]

    def abstract_params(self) -> nnx.State:
        """The parameters' shapes, without memory."""
        return jax.tree.map(lambda x: x, skeleton(self)[1])  # a copy: loading fills it in place

    def forced(self, params: nnx.State, source: Int[AnyArray, "B S"], source_length: Int[AnyArray, " B"],
               target: Int[AnyArray, "B T"], key: Array | None = None, after: AfterLayer = last_written
               ) -> Float[Array, "B T V"]:
        """Teacher forcing: logits [B, T, V] that predict each of `target` [B, T] after the prompt
        `source`. Gemma has no dropout: `key` is not read. `after` stands between the layers; of the
        network's passes, that over the target comes last."""
        _, cache = self.prefill(params, source, source_length, source.shape[1] + target.shape[1], after)
        last = jnp.take_along_axis(source, jnp.maximum(source_length - 1, 0)[:, None], axis=1)[:, 0]
        return self.extend(params, shift_right(target, last), cache, after)[0]

    def prefill(self, params: nnx.State, inputs: Int[AnyArray, "B S"], input_length: Int[AnyArray, " B"],
                max_length: int, after: AfterLayer = last_written) -> tuple[Prefix, GemmaCache]:
        """Reads the prompts, padded on the right: the padding is scratch past each row's length."""
        c, network = self.config, nnx.merge(self.graphdef(), params)
        rows, size = inputs.shape
        blank = empty(rows, c.num_kv_heads, max_length, c.d_kv, self.cache_dtype)
        cache = GemmaCache((blank,) * c.num_layers, (blank,) * c.num_layers, jnp.zeros((rows,), jnp.int32))

        def read(cache: GemmaCache, part: AnyArray) -> tuple[GemmaCache, None]:
            return network.advance(part, cache, after=after)[1], None

        first = size % self.chunk
        if first:
            cache, _ = read(cache, inputs[:, :first])
        if size > first:
            chunks = jnp.moveaxis(inputs[:, first:].reshape(rows, -1, self.chunk), 1, 0)
            cache, _ = lax.scan(read, cache, chunks)
        prefix = Prefix(jnp.asarray(inputs), jnp.asarray(input_length))
        return prefix, cache._replace(length=jnp.maximum(prefix.length - 1, 0))

    def roll_back(self, cache: GemmaCache, length: Int[AnyArray, " B"]) -> GemmaCache:
        return cache._replace(length=jnp.asarray(length))

    def insert(self, cache: GemmaCache, fresh: GemmaCache, slots: Int[AnyArray, " R"], like_fresh: bool
               ) -> GemmaCache:
        keys, values = (tuple(insert_buffer(a, b, slots, like_fresh) for a, b in zip(old, new, strict=True))
                        for old, new in ((cache.keys, fresh.keys), (cache.values, fresh.values)))
        return GemmaCache(keys, values, insert_rows(cache.length, fresh.length, slots, like_fresh))

    def extend_branches(self, params: nnx.State, tokens: Int[AnyArray, " M"], cache: GemmaCache,
                        branches: Branches) -> Float[Array, "B M V"]:
        """Float32 logits after each node of a tree of texts; the cache stays as it is."""
        return read_branches(nnx.merge(self.graphdef(), params), tokens, cache, branches)

    def extend(self, params: nnx.State, tokens: Int[AnyArray, "B T"], cache: GemmaCache,
               after: AfterLayer = last_written, table: Any = None
               ) -> tuple[Float[Array, "B T V"], GemmaCache]:
        """`table`, a kernel [D, V], stands for the embedding that makes the logits."""
        network = nnx.merge(self.graphdef(), params)
        x, cache = network.advance(tokens, cache, after=after)
        return network.logits(x, table=table), cache
