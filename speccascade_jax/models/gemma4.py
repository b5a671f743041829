"""The text model of Gemma 4 in Flax NNX.

Its layers differ in ways that DecoderConfig cannot express: global layers have heads of another size than
local ones, the last layers read the keys and values of earlier layers, and each layer may have its own input.
`Gemma4` is the network, and `Gemma4Model` implements LanguageModel.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from speccascade_jax.core.protocols import AnyArray
from speccascade_jax.models.cache import LocalCache, blank, entries, remembering
from speccascade_jax.models.decoder import (
    ACTIVATIONS,
    Affine,
    DecoderConfig,
    DecoderOnlyModel,
    Ends,
    FeedForward,
    Norm,
    mixed,
    unscaled,
)
from speccascade_jax.models.layers import (
    AfterLayer,
    Branches,
    Linear,
    last_written,
    settled,
    sharers,
    steps_back,
    whole,
)
from speccascade_jax.models.quantization import table_rows
from speccascade_jax.models.rope import Turn, partial_powers, powers, rotated, turn
from speccascade_jax.models.stacking import each_layer, layers_of, nth

Array = jax.Array
Remember = Callable[..., tuple[Array, ...]]
"""A layer's new keys and values [B, H_kv, T, K] (none for a reader) -> those to attend to [B, H_kv, L, K]."""
Held = tuple[tuple[Array, ...], ...]
"""The keys and values [B, H_kv, L, K] of the last global writer and of the last local one."""


@dataclasses.dataclass(frozen=True)
class Gemma4Config:
    """A Gemma 4's shape. The defaults are those of E2B.

    Layers are local or global, and writers or readers. The last `num_readers` layers have no keys and values;
    they read those of the last writer of their kind.
    """

    family: ClassVar[str] = "gemma4_text"  # model_type in config.json
    scaled_embedding: ClassVar[bool] = True
    unit_offset: ClassVar[bool] = False
    vocab_size: int = 262_144
    d_model: int = 1536
    d_kv: int = 256  # of local layers
    d_kv_global: int = 512
    d_ff: int = 6144
    num_heads: int = 8
    num_kv_heads: int = 1  # of local layers
    num_kv_heads_global: int = 1
    num_layers: int = 35
    num_readers: int | None = 20
    wide_readers: bool = True  # readers' MLPs are twice as wide
    keys_are_values: bool = False  # global layers use one projection, normalised in two ways
    attention_bias: bool = False
    per_layer_width: int | None = 256  # width of each layer's own input; None: no such inputs
    activation: str = "gelu_pytorch_tanh"  # a key of ACTIVATIONS
    tied_embeddings: bool = True
    logit_softcap: float | None = 30.0
    window: int = 512  # in local layers, a token attends to itself and window - 1 before it
    local: tuple[int, ...] = (1, 1, 1, 1, 0)  # repeating pattern of local (1) and global (0) layers
    rope_theta: float = 1e6
    local_rope_theta: float = 1e4
    rope_share: float = 0.25  # share of a global layer's pairs that are rotated
    max_positions: int = 131_072
    norm_epsilon: float = 1e-6
    pad_id: int = 0
    eos_id: int = 1
    bos_id: int = 2
    more_eos: tuple[int, ...] = ()  # further tokens that end a text

    @property
    def num_writers(self) -> int:
        return self.num_layers - (self.num_readers or 0)

    def is_local(self, layer: int) -> bool:
        return bool(self.local) and bool(self.local[layer % len(self.local)])

    def kv_heads_at(self, path: tuple[Any, ...]) -> int:
        """The number of key and value heads in the layer of a writer's parameter."""
        place = path[path.index("layers") + 1]
        return self.num_kv_heads if self.is_local(place) else self.num_kv_heads_global

    def shape(self, layer: int) -> DecoderConfig:
        """The sizes of one layer's attention and MLP."""
        local = self.is_local(layer)
        return DecoderConfig(
            d_model=self.d_model,
            d_kv=self.d_kv if local else self.d_kv_global,
            d_ff=self.d_ff * (2 if self.wide_readers and layer >= self.num_writers else 1),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads if local else self.num_kv_heads_global,
            activation=self.activation,
            query_bias=self.attention_bias,
            output_bias=self.attention_bias,
            query_scalar=1,
            norm_epsilon=self.norm_epsilon,
        )


GEMMA4 = Gemma4Config()
PRESETS = {
    "gemma4_e2b": GEMMA4,
    "gemma4_e4b": dataclasses.replace(
        GEMMA4,
        d_model=2560,
        d_ff=10_240,
        num_kv_heads=2,
        num_kv_heads_global=2,
        num_layers=42,
        num_readers=18,
        wide_readers=False,
        local=(1, 1, 1, 1, 1, 0),
    ),
    "gemma4_31b": dataclasses.replace(
        GEMMA4,
        d_model=5376,
        d_ff=21_504,
        num_heads=32,
        num_kv_heads=16,
        num_kv_heads_global=4,
        num_layers=60,
        num_readers=None,
        wide_readers=False,
        keys_are_values=True,
        per_layer_width=None,
        window=1024,
        local=(1, 1, 1, 1, 1, 0),
        max_positions=262_144,
    ),
}


class Section(NamedTuple):
    """The writers or the readers, in groups with the same sequence of layer kinds."""

    name: str  # field of the network
    first: int  # first layer
    size: int  # layers of a group
    groups: int


def sections(config: Gemma4Config) -> tuple[Section, Section]:
    """The network's two sections, with groups that are as small as possible."""
    ends = 0, config.num_writers, config.num_layers
    sections = []
    for name, first, end in zip(("writers", "readers"), ends, ends[1:], strict=False):
        kinds = [config.is_local(layer) for layer in range(first, end)]
        size = next((n for n in range(1, len(kinds)) if kinds == kinds[:n] * (len(kinds) // n)), len(kinds))
        sections.append(Section(name, first, size, len(kinds) // size if size else 0))
    return sections[0], sections[1]


class Attention(nnx.Module):
    """Grouped-query attention whose values are also normalised and whose scores are not scaled."""

    def __init__(
        self,
        shape: DecoderConfig,
        writes: bool,
        has_values: bool,
        *,
        dtype: Any,
        stacked: bool,
        rngs: nnx.Rngs,
    ):
        """A layer that `writes` has keys. Without `has_values`, values are computed from the keys'
        projection."""
        c = shape
        inner, narrow = c.num_heads * c.d_kv, c.num_kv_heads * c.d_kv

        def project(inputs: int, outputs: int) -> Affine:
            return Affine(inputs, outputs, c.query_bias, dtype=dtype, rngs=rngs)

        self.query, self.out = project(c.d_model, inner), project(inner, c.d_model)
        self.key = project(c.d_model, narrow) if writes else None
        self.value = project(c.d_model, narrow) if writes and has_values else None
        self.query_norm = Norm(c, c.d_kv)
        self.key_norm = Norm(c, c.d_kv) if writes else None
        self.shape, self.stacked = c, stacked

    def heads(self, x: Array) -> Array:
        """[B, T, H K] -> [B, H, T, K]"""
        x = settled(x) if self.stacked else x
        return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, self.shape.d_kv), 1, 2)

    def written(self, x: Array, turn: Turn) -> tuple[Array, ...]:
        """The keys and values [B, H_kv, T, K] of x [B, T, D], if the layer has any."""
        if self.key is None or self.key_norm is None:
            return ()
        key = self.heads(self.key(x))
        value = key if self.value is None else self.heads(self.value(x))
        new = rotated(self.key_norm(key), turn), unscaled(value, self.shape.norm_epsilon)
        if sharers() and self.shape.num_kv_heads % sharers():
            return whole(new[0]), whole(new[1])
        return new

    def __call__(self, x: Array, remember: Remember, turn: Turn, mask: Array) -> Array:
        """x [B, T, D], rotated by `turn`, attends to the cached positions where `mask` [B, T, L] is true."""
        keys, values = remember(*self.written(x, turn))
        query = rotated(self.query_norm(self.heads(self.query(x))), turn)
        seen = jnp.any(mask, axis=-1)[..., None]  # an assistant sees nothing before the first committed token
        return whole(self.out(jnp.where(seen, mixed(self.shape, query, keys, values, mask), 0)))


class LayerInput(nnx.Module):
    """A layer's own additional input, gated by the residual stream."""

    def __init__(self, config: Gemma4Config, width: int, *, dtype: Any, rngs: nnx.Rngs):
        c = config
        self.narrow = Linear(c.d_model, width, std=c.d_model**-0.5, dtype=dtype, rngs=rngs)
        self.widen = Linear(width, c.d_model, std=width**-0.5, dtype=dtype, rngs=rngs)
        self.norm = Norm(c)
        self.activation = c.activation

    def __call__(self, x: Array, extra: Array) -> Array:
        """The stream x [B, T, D] and the input `extra` [B, T, W] -> [B, T, D]."""
        return self.norm(self.widen(ACTIVATIONS[self.activation](self.narrow(x)) * extra))


class Layer(nnx.Module):
    """Attention, an MLP and the layer's own input, each with a norm after it; then a scale."""

    def __init__(self, config: Gemma4Config, number: int, *, dtype: Any, stacked: bool, rngs: nnx.Rngs):
        c, shape, writes = config, config.shape(number), number < config.num_writers
        has_values = config.is_local(number) or not config.keys_are_values
        self.attention_norm, self.attention_post_norm = Norm(c), Norm(c)
        self.mlp_norm, self.mlp_post_norm = Norm(c), Norm(c)
        self.attention = Attention(shape, writes, has_values, dtype=dtype, stacked=stacked, rngs=rngs)
        self.mlp = FeedForward(shape, dtype=dtype, rngs=rngs)
        width = c.per_layer_width
        self.input = LayerInput(c, width, dtype=dtype, rngs=rngs) if width else None
        self.scalar = nnx.Param(jnp.ones((1,)))

    def __call__(self, x: Array, remember: Remember, turn: Turn, mask: Array, extra: Array | None) -> Array:
        """Like Attention.__call__(); `extra` [B, T, W] is the layer's own input."""
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), remember, turn, mask))
        x = x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))
        if self.input is not None and extra is not None:
            x = x + self.input(x, extra)
        return x * self.scalar[...].astype(jnp.float32)


class Group(nnx.Module):
    """Consecutive layers of a section; all of its groups have the same kinds of layers in the same order."""

    def __init__(self, layers: list[Layer]):
        self.layers = nnx.List(layers)


class PerLayerInputs(nnx.Module):
    """Each layer's own input: an embedding of the token, and a projection of its embedding in the stream."""

    def __init__(self, config: Gemma4Config, width: int, *, dtype: Any, rngs: nnx.Rngs):
        c = config
        self.width, self.outputs = width, c.num_layers * width
        self.embedding = nnx.Param(
            width**-0.5 * jax.random.normal(rngs.params(), (c.vocab_size, self.outputs))
        )
        self.projection = Linear(c.d_model, self.outputs, std=c.d_model**-0.5, dtype=dtype, rngs=rngs)
        self.norm = Norm(c, width)

    def __call__(self, tokens: AnyArray, x: Array) -> Array:
        """The inputs [N, B, T, W] of N layers for tokens [B, T] that are embedded as x [B, T, D]."""

        def of_layers(values: Array) -> Array:
            return values.reshape(*tokens.shape, -1, self.width)

        projected = self.norm(of_layers(self.projection(x) * x.shape[-1] ** -0.5))
        embedded = of_layers(table_rows(self.embedding.get_value(), tokens)) * self.width**0.5
        return jnp.moveaxis((projected + embedded) * 2**-0.5, 2, 0)


class Kind(NamedTuple):
    """The values that all global layers, or all local ones, share in one call."""

    turn: Turn
    mask: Array  # [B, T, L]


def kinds_of(config: Gemma4Config, positions: Array, back: Array) -> tuple[Kind, Kind]:
    """The Kind of global layers and that of local ones, for tokens at `positions` [B, T] that are `back` [B,
    T, L] steps after each key."""
    c, steps = config, positions[..., None].astype(jnp.float32)
    slow = partial_powers(c.rope_theta, c.d_kv_global // 2, c.rope_share)
    fast = powers(c.local_rope_theta, c.d_kv // 2)
    return (
        Kind(turn(steps * slow, 1.0), back >= 0),
        Kind(turn(steps * fast, 1.0), (back >= 0) & (back < c.window)),
    )


class Pass(NamedTuple):
    """One call of the network."""

    kinds: tuple[Kind, Kind]
    extras: Array | None  # [N, B, T, W]: the layers' own inputs
    after: AfterLayer
    remat: bool

    def layer(
        self, layer: Layer, number: Any, local: bool, remember: Remember, x: Array, *held: Any
    ) -> tuple[Any, ...]:
        """The output of layer `number`, and the buffers `held` after it. `remember` reads and writes a list
        of them."""

        def call(x: Array, *held: Any) -> tuple[Any, ...]:
            buffers = list(held)
            extra = None if self.extras is None else nth(self.extras, number)
            return layer(x, partial(remember, buffers), *self.kinds[local], extra), *buffers

        new, *buffers = (jax.checkpoint(call) if self.remat else call)(x, *held)
        return self.after(number, x, new), *buffers


def write_and_read(number: Any, start: Array, buffers: list[Any], *new: Array) -> tuple[Array, ...]:
    """The arrays that a writer remembers; see cache.remembering()."""
    return remembering(buffers, number, start)(*new)


def only_read(buffers: list[Array]) -> tuple[Array, ...]:
    """The arrays that a reader remembers."""
    return tuple(buffers)


class Layered(Ends):
    """Writers and readers between the ends of a network."""

    def add_layers(self, *, dtype: Any, stacked: bool, rngs: nnx.Rngs) -> None:
        c = self.config

        def group(first: int, size: int) -> Group:
            return Group([Layer(c, first + n, dtype=dtype, stacked=stacked, rngs=rngs) for n in range(size)])

        self.writers, self.readers = (
            layers_of([group(first + size * n, size) for n in range(groups)], stacked)
            for _, first, size, groups in sections(c)
        )
        width = c.per_layer_width
        self.per_layer = PerLayerInputs(c, width, dtype=dtype, rngs=rngs) if width else None

    def read(self, made: Pass, held: Held, number: Any, group: Group, x: Array) -> Array:
        """The stream [B, T, D] after group `number` of readers, which read `held`."""
        first = self.config.num_writers
        for place, layer in enumerate(group.layers):
            local = self.config.is_local(first + place)
            x, *_ = made.layer(
                layer, first + number * len(group.layers) + place, local, only_read, x, *held[local]
            )
        return x


class Gemma4(Layered):
    """The network."""

    def start(self, rows: int, max_length: int, dtype: Any) -> LocalCache:
        """An empty cache in `dtype`."""
        c = self.config
        local = sum(c.is_local(layer) for layer in range(c.num_writers))
        full, near = (
            blank(self.writers, rows, heads, max_length, width, dtype, count)
            for heads, width, count in (
                (c.num_kv_heads_global, c.d_kv_global, c.num_writers - local),
                (c.num_kv_heads, c.d_kv, local),
            )
        )
        return LocalCache(full, full, near, near, jnp.zeros((rows,), jnp.int32))

    def advance(
        self,
        tokens: AnyArray,
        cache: LocalCache,
        after: AfterLayer = last_written,
        branches: Branches | None = None,
    ) -> tuple[Array, LocalCache]:
        """The last layer's output [B, T, D] for each of `tokens` [B, T], read at cache.length, in sequence or
        as branches."""
        count, x = tokens.shape[1], self.embed(tokens)
        positions = cache.length[:, None] + (jnp.arange(count) if branches is None else branches.depth - 1)
        back = steps_back(cache.length, count, entries(cache.global_keys), branches)
        extras = None if self.per_layer is None else self.per_layer(tokens, x)
        made = Pass(kinds_of(self.config, positions, back), extras, after, self.remat)
        full, near = (cache.global_keys, cache.global_values), (cache.local_keys, cache.local_values)
        x, (full, near) = each_layer(self.writers, partial(self.write, made, cache.length), (x, (full, near)))
        cache = LocalCache._make((*full, *near, cache.length + count))
        return each_layer(self.readers, partial(self.read, made, self.last(cache)), x), cache

    def write(self, made: Pass, start: Array, number: Any, group: Group, carry: Any) -> Any:
        """`carry`, which is the stream [B, T, D] and the buffers of both kinds of layers, after group
        `number` of writers."""
        x, buffers = carry[0], list(carry[1])
        kinds = [self.config.is_local(place) for place in range(len(group.layers))]
        for place, (layer, local) in enumerate(zip(group.layers, kinds, strict=True)):
            rank = number * kinds.count(local) + kinds[:place].count(local)  # index among layers of its kind
            x, *held = made.layer(
                layer,
                number * len(kinds) + place,
                local,
                partial(write_and_read, rank, start),
                x,
                *buffers[local],
            )
            buffers[local] = tuple(held)
        return x, tuple(buffers)

    def last(self, cache: LocalCache) -> Held:
        """The keys and values that readers read."""
        buffers = (cache.global_keys, cache.global_values), (cache.local_keys, cache.local_values)
        return tuple(tuple(nth(each, len(each) - 1) for each in kind if len(each)) for kind in buffers)


@dataclasses.dataclass(frozen=True)
class Gemma4Model(DecoderOnlyModel):
    """The LanguageModel of a Gemma 4. With initial parameters, every layer's input and output and the logits
    have unit variance."""

    config: Gemma4Config

    def network(self, rngs: nnx.Rngs) -> Gemma4:
        return Gemma4(
            self.config, dtype=jnp.dtype(self.dtype), remat=self.remat, stacked=self.stacked, rngs=rngs
        )
