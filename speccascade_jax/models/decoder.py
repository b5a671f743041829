"""One decoder in Flax NNX for the decoder-only families Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3.

`DecoderConfig` describes their differences, and models.presets has each family's usual config. `Decoder` is
the network, and `DecoderModel` implements LanguageModel.
"""

import dataclasses
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Bool, Float, Int

from speccascade_jax.core.protocols import AnyArray, Prefix
from speccascade_jax.models import cache as caches
from speccascade_jax.models.base import SingleModel
from speccascade_jax.models.cache import DecoderCache, blank, entries, remembering
from speccascade_jax.models.layers import (
    AfterLayer,
    Branches,
    Linear,
    by_rows,
    last_written,
    project,
    settled,
    sharers,
    shift_right,
    steps_back,
    whole,
    with_kept,
)
from speccascade_jax.models.quantization import table_rows, tied_kernel
from speccascade_jax.models.rope import Turn, rotated, turns
from speccascade_jax.models.stacking import blank_states, each_layer, layers_of, with_state

Array = jax.Array
SCORES = 2**25  # attention scores computed at once: 128 MB
MASKED = -1e9  # finite, so that a fully masked row does not give NaN
Remember = Callable[[Array, Array], tuple[Array, ...]]
"""A layer's new keys and values [B, H_kv, T, K] -> all keys and values to attend to [B, H_kv, L, K]."""
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder's shape. The defaults are those of Llama 2 7B."""

    # The family of the model: model_type in config.json.
    family: str = "llama"
    # The size of the vocabulary, including padding.
    vocab_size: int = 32_000
    # The width of the model.
    d_model: int = 4096
    # The width of an attention head.
    d_kv: int = 128
    # The width of the MLP.
    d_ff: int = 11_008
    # The number of attention heads.
    num_heads: int = 32
    # The number of key and value heads.
    num_kv_heads: int = 32
    # The number of layers.
    num_layers: int = 32
    # The activation of the MLP: silu, gelu_pytorch_tanh or gelu.
    activation: str = "silu"
    # Share input and output embeddings.
    tied_embeddings: bool = False
    # Add biases to queries, keys and values.
    query_bias: bool = False
    # Add a bias to the output projection of attention.
    output_bias: bool = False
    # Add biases to the MLP.
    mlp_bias: bool = False
    # Normalise each head's queries and keys.
    head_norms: bool = False
    # Normalise the outputs of attention and MLP, too.
    post_norms: bool = False
    # Scale in norms by one plus the stored value.
    unit_offset: bool = False
    # Multiply embeddings by sqrt(d_model).
    scaled_embedding: bool = False
    # Attention scores are divided by the square root of this number. None uses d_kv.
    query_scalar: int | None = None
    # Soft cap of attention scores. None does not cap.
    attention_softcap: float | None = None
    # Soft cap of logits. None does not cap.
    logit_softcap: float | None = None
    # The number of tokens that a token of a local layer attends to, including itself.
    window: int | None = None
    # The pattern of local (1) and global (0) layers, which repeats. If empty, all layers are global.
    local: tuple[int, ...] = ()
    # The base of rotary frequencies.
    rope_theta: float = 10_000.0
    # The base in local layers, where frequencies are not scaled. None treats local layers like the others.
    local_rope_theta: float | None = None
    # The scaling of rotary frequencies: default, linear, dynamic, llama3 or yarn.
    rope_type: str = "default"
    # The factor of that scaling.
    rope_factor: float = 1.0
    # For llama3 and yarn: the length of training texts. None uses max_positions.
    rope_length: int | None = None
    # For llama3 and yarn: frequencies with fewer rotations over that length are divided by the factor.
    rope_low: float = 1.0
    # For llama3 and yarn: frequencies with more rotations over that length are kept.
    rope_high: float = 4.0
    # For yarn: the factor of sines and cosines.
    rope_attention: float = 1.0
    # For yarn: round the ends of the ramp to integers.
    rope_truncate: bool = True
    # The longest text. The scaling `dynamic` and readers of exported folders use it.
    max_positions: int = 4096
    # The epsilon of norms.
    norm_epsilon: float = 1e-5
    # The padding token.
    pad_id: int = 0
    # The end-of-sequence token.
    eos_id: int = 2
    # The token at the beginning of a text.
    bos_id: int = 1
    # Further tokens that end a text.
    more_eos: tuple[int, ...] = ()

    def is_local(self, layer: int) -> bool:
        return bool(self.local) and bool(self.local[layer % len(self.local)])


def kind_of(config: DecoderConfig, kinds: tuple[Any, ...], number: Any) -> Any:
    """The value of layer `number`: the first of `kinds` for global layers, the second for local ones."""
    if isinstance(number, int):
        return kinds[config.is_local(number)]
    local = [config.is_local(n) for n in range(config.num_layers)]
    if len(set(local)) == 1:
        return kinds[local[0]]
    return jax.tree.map(partial(jnp.where, jnp.array(local)[number]), kinds[True], kinds[False])


def softcap(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap): the identity near 0, never beyond +-cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def even(count: int, limit: int) -> int:
    """The size of the parts, at most `limit`, into which `count` items are divided. Parts are equal, because
    a remainder would be compiled separately, unless that would double their number."""
    if count <= limit:
        return limit
    return next((size for size in range(limit, limit // 2, -1) if count % size == 0), limit)


def unscaled(x: Array, epsilon: float) -> Array:
    """x / sqrt(mean(x^2) + epsilon)."""
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


class Norm(nnx.Module):
    """unscaled(x) * scale, or with unit_offset * (1 + scale), as checkpoints store it."""

    def __init__(self, config: Any, features: int | None = None):
        self.offset = float(config.unit_offset)
        self.scale = nnx.Param(jnp.full((features or config.d_model,), 1.0 - self.offset))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: Array) -> Array:
        return unscaled(x, self.epsilon) * (self.offset + self.scale[...].astype(jnp.float32))


class Affine(Linear):
    """x [..., in] -> float32 [..., out], with an optional bias."""

    def __init__(self, inputs: int, outputs: int, bias: bool, *, dtype: Any, rngs: nnx.Rngs):
        super().__init__(inputs, outputs, std=inputs**-0.5, dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((outputs,))) if bias else None

    def __call__(self, x: Array) -> Array:
        y = super().__call__(x)
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)


class Memory(NamedTuple):
    """The keys and values that queries attend to."""

    keys: Array  # [B, H_kv, L, K], or as in a single row's cache
    values: Array
    mask: Array  # [B, T, L], or [B, 1, L] if it is the same for all queries


def mixed(
    config: DecoderConfig, query: Array, keys: Array, values: Array, mask: Array, *more: Memory
) -> Array:
    """Grouped-query attention: query [B, H, T, K], keys and values [B, H_kv, L, K] (or as in a single row's
    cache), visible where `mask` [B, T, L] -> [B, T, H K]. One softmax covers these and the memories in
    `more`. Tokens are processed in parts with at most SCORES scores each."""
    c, (rows, heads, count, _) = config, query.shape
    memories = Memory(keys, values, mask), *more
    if sharers() and c.num_kv_heads % sharers():  # otherwise XLA gathers the cache of all layers in each call
        arrays = query, *(x for memory in memories for x in memory[:2])
        query, *kept = by_rows(arrays) if keys.ndim == query.ndim else map(whole, arrays)
        memories = tuple(
            Memory(kept[2 * n], kept[2 * n + 1], memory.mask) for n, memory in enumerate(memories)
        )
    size = sum(memory.mask.shape[-1] for memory in memories)
    at_once = even(count, max(SCORES // (rows * heads * size), 1))
    if count > at_once:

        def attend_token(token: tuple[Array, ...]) -> Array:
            query, *masks = token
            first, *others = (
                memory._replace(mask=mask[:, None]) for memory, mask in zip(memories, masks, strict=True)
            )
            return mixed(c, query[:, :, None], *first, *others)[:, 0]

        masks = (jnp.broadcast_to(x.mask, (rows, count, x.mask.shape[-1])) for x in memories)
        by_token = jnp.moveaxis(query, 2, 0), *(jnp.moveaxis(mask, 1, 0) for mask in masks)
        return jnp.moveaxis(lax.map(attend_token, by_token, batch_size=at_once), 0, 1)
    return at_once_mixed(c, query, memories)


def at_once_mixed(config: DecoderConfig, query: Array, memories: tuple[Memory, ...]) -> Array:
    """mixed() of all tokens at once."""
    c, rows, count = config, query.shape[0], query.shape[2]
    groups = query.reshape(rows, c.num_kv_heads, -1, c.d_kv)  # [B, H_kv, R T, K]
    groups = groups * (c.query_scalar or c.d_kv) ** -0.5

    def scores_of(memory: Memory) -> Array:
        scores = softcap(with_kept("...tk,...lk->...tl", groups, memory.keys), c.attention_softcap)
        by_query = scores.reshape(*scores.shape[:2], -1, *memory.mask.shape[1:])  # [B, H_kv, R, T, L]
        return jnp.where(memory.mask[:, None, None], by_query, MASKED).reshape(scores.shape)

    scores = [scores_of(memory) for memory in memories]
    ends = np.cumsum([x.shape[-1] for x in scores])[:-1]
    weights = jnp.split(jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1), ends, axis=-1)
    attended = [
        with_kept("...tl,...lk->...tk", weight, memory.values)
        for weight, memory in zip(weights, memories, strict=True)
    ]
    by_head = reduce(jnp.add, attended).reshape(query.shape)
    return jnp.swapaxes(by_head, 1, 2).reshape(rows, count, -1)


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions; scores may be capped."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        width: int | None = None,
        reads: int | None = None,
        dtype: Any,
        stacked: bool,
        rngs: nnx.Rngs,
    ):
        """`width`: the width of the input, by default d_model. `reads`: that of the input of keys and values,
        by default the same."""
        c = config
        inner, narrow, width = c.num_heads * c.d_kv, c.num_kv_heads * c.d_kv, width or c.d_model
        reads = reads or width
        self.query = Affine(width, inner, c.query_bias, dtype=dtype, rngs=rngs)
        self.key = Affine(reads, narrow, c.query_bias, dtype=dtype, rngs=rngs)
        self.value = Affine(reads, narrow, c.query_bias, dtype=dtype, rngs=rngs)
        self.out = Affine(inner, c.d_model, c.output_bias, dtype=dtype, rngs=rngs)
        self.query_norm = Norm(c, c.d_kv) if c.head_norms else None
        self.key_norm = Norm(c, c.d_kv) if c.head_norms else None
        self.config, self.stacked = c, stacked

    def heads(self, x: Array, norm: Norm | None = None) -> Array:
        """[B, T, H K] -> [B, H, T, K]"""
        x = settled(x) if self.stacked else x
        x = x.reshape(*x.shape[:-1], -1, self.config.d_kv)
        return jnp.swapaxes(x if norm is None else norm(x), 1, 2)

    def keys_and_values(self, x: Array, turn: Turn) -> tuple[Array, Array]:
        """The keys and values of x [B, T, D] for the cache: [B, H_kv, T, K] each."""
        new = (rotated(self.heads(self.key(x), self.key_norm), turn), self.heads(self.value(x)))
        if sharers() and self.config.num_kv_heads % sharers():
            return whole(new[0]), whole(new[1])
        return new

    def __call__(self, x: Array, remember: Remember, turn: Turn, mask: Array, *more: Memory) -> Array:
        """x [B, T, D], rotated by `turn`, attends to the cached positions where `mask` [B, T, L] is true, and
        to `more`."""
        keys, values = remember(*self.keys_and_values(x, turn))
        query = rotated(self.heads(self.query(x), self.query_norm), turn)
        return whole(self.out(mixed(self.config, query, keys, values, mask, *more)))


class FeedForward(nnx.Module):
    """A gated layer (Shazeer 2020): (f(x W0) * (x W1)) Wo."""

    def __init__(self, config: DecoderConfig, *, dtype: Any, rngs: nnx.Rngs):
        c = config
        self.gate = Affine(c.d_model, c.d_ff, c.mlp_bias, dtype=dtype, rngs=rngs)
        self.up = Affine(c.d_model, c.d_ff, c.mlp_bias, dtype=dtype, rngs=rngs)
        self.down = Affine(c.d_ff, c.d_model, c.mlp_bias, dtype=dtype, rngs=rngs)
        self.activation = c.activation

    def __call__(self, x: Array) -> Array:
        return whole(self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x)))


class Layer(nnx.Module):
    def __init__(self, config: DecoderConfig, *, dtype: Any, stacked: bool, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = Norm(config), Norm(config)
        self.attention_post_norm = Norm(config) if config.post_norms else None
        self.mlp_post_norm = Norm(config) if config.post_norms else None
        self.attention = Attention(config, dtype=dtype, stacked=stacked, rngs=rngs)
        self.mlp = FeedForward(config, dtype=dtype, rngs=rngs)

    def attend(self, x: Array, remember: Remember, turn: Turn, mask: Array, *beside: Any) -> Array:
        """A hook for subclasses that replace attention."""
        return self.attention(x, remember, turn, mask)

    def between(self, x: Array, *beside: Any) -> Array:
        """A hook for subclasses between attention and MLP."""
        return x

    def __call__(self, x: Array, remember: Remember, turn: Turn, mask: Array, *beside: Any) -> Array:
        """Like Attention.__call__(); `beside` is passed to attend() and between()."""
        attended = self.attend(self.attention_norm(x), remember, turn, mask, *beside)
        x = x + (attended if self.attention_post_norm is None else self.attention_post_norm(attended))
        x = self.between(x, *beside)
        made = self.mlp(self.mlp_norm(x))
        return x + (made if self.mlp_post_norm is None else self.mlp_post_norm(made))


class Ends(nnx.Module):
    """The parts of a decoder-only network around its layers: an embedding, a final norm, and a head unless
    the embedding is the head. `dtype` is that of matrix products; sums and logits are float32."""

    def __init__(
        self,
        config: Any,
        *,
        dtype: Any = jnp.float32,
        remat: bool = False,
        stacked: bool = False,
        rngs: nnx.Rngs,
    ):
        c = config
        self.config, self.dtype, self.remat = c, jnp.dtype(dtype), remat
        self.embedding = nnx.Param(
            c.d_model**-0.5 * jax.random.normal(rngs.params(), (c.vocab_size, c.d_model))
        )
        self.add_layers(dtype=dtype, stacked=stacked, rngs=rngs)
        self.norm = Norm(c)
        self.head = (
            None
            if c.tied_embeddings
            else Linear(c.d_model, c.vocab_size, std=c.d_model**-0.5, dtype=dtype, rngs=rngs)
        )

    def add_layers(self, *, dtype: Any, stacked: bool, rngs: nnx.Rngs) -> None:
        """Adds the network's layers."""
        raise NotImplementedError

    def new_norm(self) -> Norm:
        return Norm(self.config)

    @property
    def final_norm(self) -> Norm:
        return self.norm

    def head_kernel(self) -> Array:
        """[D, V]: the kernel of a linear head that gives the logits before their cap."""
        return self.embedding[...].T if self.head is None else self.head.kernel[...]

    def embed(self, tokens: AnyArray) -> Array:
        x = table_rows(self.embedding.get_value(), tokens)
        if not self.config.scaled_embedding:
            return x
        scale = jnp.sqrt(jnp.float32(self.config.d_model)).astype(self.norm.scale.dtype)  # as in training
        return x * scale.astype(jnp.float32)

    def logits(
        self,
        x: Array,
        norm: Callable[[Array], Array] | None = None,
        head: Linear | None = None,
        table: Any = None,
    ) -> Array:
        """[B, T, D] -> capped logits [B, T, V], from the head or the embedding. `norm` and `head` replace the
        network's, and a kernel `table` [D, I] replaces the embedding."""
        x = self.norm(x) if norm is None else norm(x)
        head = self.head if head is None and table is None else head
        if head is not None:
            return softcap(head(x), self.config.logit_softcap)
        table = tied_kernel(self.embedding.get_value()) if table is None else table
        return softcap(project(x, table, self.dtype), self.config.logit_softcap)


class Decoder(Ends):
    """The network."""

    def add_layers(self, *, dtype: Any, stacked: bool, rngs: nnx.Rngs) -> None:
        layers = [
            self.new_layer(dtype=dtype, stacked=stacked, rngs=rngs) for _ in range(self.config.num_layers)
        ]
        self.layers = layers_of(layers, stacked)

    def new_layer(self, **fields: Any) -> Layer:
        return Layer(self.config, **fields)

    def start(self, rows: int, max_length: int, dtype: Any) -> DecoderCache:
        """An empty cache in `dtype`."""
        c = self.config
        buffers = blank(self.layers, rows, c.num_kv_heads, max_length, c.d_kv, dtype)
        return DecoderCache(buffers, buffers, jnp.zeros((rows,), jnp.int32))

    def beside(self, cache: Any, number: Any) -> tuple[Any, ...]:
        """The inputs of the `number`-th layer that differ between layers."""
        return ()

    def advance(
        self,
        tokens: AnyArray,
        cache: Any,
        depth: int | None = None,
        after: AfterLayer = last_written,
        branches: Branches | None = None,
    ) -> tuple[Array, Any]:
        """The output [B, T, D] of layer `depth`, by default the last, for each of `tokens` [B, T], read at
        cache.length, in sequence or as branches. Layers above it do not run."""
        x, _, cache = self.advance_with_states(tokens, cache, (), depth, after, branches)
        return x, cache

    def advance_with_states(
        self,
        tokens: AnyArray,
        cache: Any,
        before: tuple[int, ...],
        depth: int | None = None,
        after: AfterLayer = last_written,
        branches: Branches | None = None,
    ) -> tuple[Array, Any, Any]:
        """advance(), with the tokens' states [N, B, T, D] before N layers, in the order of `before`. 0 is the
        embedding; the number of layers means the last layer's output before the norm. None if `before` is
        empty."""
        c, count = self.config, tokens.shape[1]
        positions = cache.length[:, None] + (jnp.arange(count) if branches is None else branches.depth - 1)
        back = steps_back(cache.length, count, entries(cache.keys), branches)  # [B, T, L]
        everything = back >= 0
        near = everything if c.window is None else everything & (back < c.window)
        kinds = tuple(zip(turns(c, positions), (everything, near), strict=True))

        def apply_layer(n: Any, layer: Layer, carry: Any) -> Any:
            def call(x, *buffers):
                buffers = list(buffers)
                x = layer(
                    x, remembering(buffers, n, cache.length), *kind_of(c, kinds, n), *self.beside(cache, n)
                )
                return x, *buffers

            x, states, *held = carry
            states = with_state(states, before, n, x)
            new, *buffers = (jax.checkpoint(call) if self.remat else call)(x, *held)
            return after(n, x, new), states, *buffers

        x = self.embed(tokens)
        begun = x, blank_states(before, x), cache.keys, cache.values
        x, states, keys, values = each_layer(self.layers, apply_layer, begun, depth)
        if states is not None:
            states = with_state(states, before, c.num_layers, x)[:-1]
        return x, states, cache._replace(keys=keys, values=values, length=cache.length + count)


def in_chunks(
    advance: Callable[[AnyArray, Any], tuple[Any, Any]], inputs: AnyArray, cache: Any, limit: int
) -> Any:
    """The cache after advance(tokens, cache) over all of `inputs` [B, S], at most `limit` tokens at a
    time."""

    def read(cache: Any, part: AnyArray) -> tuple[Any, None]:
        return advance(part, cache)[1], None

    rows, size = inputs.shape
    chunk = even(size, limit)
    first = size % chunk
    if first:
        cache, _ = read(cache, inputs[:, :first])
    if size > first:
        chunks = jnp.moveaxis(inputs[:, first:].reshape(rows, -1, chunk), 1, 0)
        cache, _ = lax.scan(read, cache, chunks)
    return cache


def read_prompts(
    model: Any,
    params: nnx.State,
    inputs: Int[AnyArray, "B S"],
    input_length: Int[AnyArray, " B"],
    max_length: int,
    after: AfterLayer = last_written,
) -> tuple[Prefix, Any]:
    """prefill() of a model whose network has start() and advance(). Prompts are padded on the right; the
    padding is scratch past each row's length."""
    network = model.merged(params)
    cache = network.start(inputs.shape[0], max_length, model.cache_dtype)
    cache = in_chunks(partial(network.advance, after=after), inputs, cache, model.chunk)
    prefix = Prefix(jnp.asarray(inputs), jnp.asarray(input_length))
    return prefix, model.roll_back(cache, jnp.maximum(prefix.length - 1, 0))


def forced_inputs(
    source: Int[AnyArray, "B S"], source_length: Int[AnyArray, " B"], target: Int[AnyArray, "B T"]
) -> tuple[Int[Array, " B"], Int[Array, "B T"]]:
    """The tokens [B, T] that are read to predict each of `target` after a prompt, and where they begin."""
    begin = jnp.maximum(source_length - 1, 0)
    return begin, shift_right(target, jnp.take_along_axis(source, begin[:, None], axis=1)[:, 0])


@dataclasses.dataclass(frozen=True)
class DecoderOnlyModel(SingleModel):
    """A network with start(), advance() and logits() as a LanguageModel that continues its prompt."""

    chunk: int = 512  # tokens of a prompt read at a time, which bounds the memory of attention scores

    def forced_states(
        self,
        params: nnx.State,
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
        after: AfterLayer = last_written,
    ) -> Float[Array, "B T D"]:
        """The target follows the prompt `source`. There is no dropout, so `key` is ignored. The network's
        last pass is the one over the target."""
        _, cache = self.prefill(params, source, source_length, source.shape[1] + target.shape[1], after)
        network, (_, tokens) = self.merged(params), forced_inputs(source, source_length, target)
        return network.final_norm(network.advance(tokens, cache, after=after)[0])

    def prefill(
        self,
        params: nnx.State,
        inputs: Int[AnyArray, "B S"],
        input_length: Int[AnyArray, " B"],
        max_length: int,
        after: AfterLayer = last_written,
    ) -> tuple[Prefix, Any]:
        return read_prompts(self, params, inputs, input_length, max_length, after)

    def extend(
        self,
        params: nnx.State,
        tokens: Int[AnyArray, "B T"],
        cache: Any,
        after: AfterLayer = last_written,
        table: Any = None,
    ) -> tuple[Float[Array, "B T V"], Any]:
        """`table`, a kernel [D, V], replaces the embedding in the logits."""
        network = self.merged(params)
        x, cache = network.advance(tokens, cache, after=after)
        return network.logits(x, table=table), cache

    def segment(self, cache: Any, row: Int[AnyArray, ""], start: Int[AnyArray, ""], size: int) -> Any:
        return caches.segment(cache, row, start, size)

    def with_segment(
        self, cache: Any, segment: Any, rows: Bool[AnyArray, " B"], start: Int[AnyArray, ""]
    ) -> Any:
        return caches.with_segment(cache, segment, rows, start)


@dataclasses.dataclass(frozen=True)
class DecoderModel(DecoderOnlyModel):
    """The LanguageModel of a DecoderConfig. With initial parameters, every layer's input and output and the
    logits have unit variance."""

    config: DecoderConfig

    def network(self, rngs: nnx.Rngs) -> Decoder:
        return Decoder(
            self.config, dtype=jnp.dtype(self.dtype), remat=self.remat, stacked=self.stacked, rngs=rngs
        )
