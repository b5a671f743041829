"""Shared types: the LanguageModel protocol, Prefix, SamplingOptions.

Shape letters: B rows, T tokens in this call, S source, L buffer, G block size (gamma),
V vocabulary, H heads, D width, K verifiers of a hierarchy.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

Array = jax.Array
AnyArray = jax.Array | np.ndarray
Params = Any
Cache = Any


class Prefix(NamedTuple):
    """What decoding continues: a prompt, or the start token of an encoder-decoder."""

    tokens: Int[Array, "B P"]
    length: Int[Array, " B"]


@partial(jax.tree_util.register_dataclass, data_fields=["temperature", "top_p", "top_k", "min_p"],
         meta_fields=["max_top_k"])
@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How a distribution is transformed before sampling: temperature, then top-k, top-p and min-p.

    Each is one number for all rows or one for each row [B], and traced: sweeping them compiles once. None
    leaves a truncation, and what it costs, out of the program; a row without it has top_k 0, top_p 1
    or min_p 0. No row's top_k exceeds `max_top_k`, which is static: unless given, the next power of two, or
    the vocabulary's size for a top_k that is traced already.
    """

    temperature: Any = 1.0
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    max_top_k: int | None = None

    def __post_init__(self) -> None:
        if self.max_top_k is None and isinstance(self.top_k, int | np.ndarray | np.integer):
            most = 1 << max(int(np.max(self.top_k)) - 1, 0).bit_length()
            object.__setattr__(self, "max_top_k", most)

    def of_rows(self, rows: int) -> "SamplingOptions":
        """The same with every value [B]. Raises ValueError where one has another shape than [] or [B]."""
        types = {"temperature": jnp.float32, "top_p": jnp.float32, "top_k": jnp.int32, "min_p": jnp.float32}
        values = {}
        for name, dtype in types.items():
            value = getattr(self, name)
            if value is not None and jnp.shape(value) not in ((), (rows,)):
                raise ValueError(f"{name} has shape {jnp.shape(value)}; give one number, or one for each of "
                                 f"the {rows} rows.")
            values[name] = None if value is None else jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))
        return SamplingOptions(**values, max_top_k=self.max_top_k)


@runtime_checkable
class LanguageModel(Protocol):
    """A next-token model whose cache is an explicit pytree with a per-row `length`.

    Static and hashable; parameters are passed in. Five laws, tested for every model:
      append      extend() writes at cache.length and raises it by T; logits[:, t] predict what
                  follows tokens[:, t]
      chunk       extending by a+b equals extending by a, then by b
      rollback    roll_back(cache, n), then extending, equals never having written past n
      rows        no row's logits depend on another row
      vocabulary  tokens in and logits out are over the target vocabulary, whatever lies inside

    Every array of a cache begins with the axis of rows. A model whose cache is laid out in another way also
    has insert(cache, fresh, slots, like_fresh): see `insert` below.
    """

    @property
    def vocab_size(self) -> int: ...

    def prefill(self, params: Params, inputs: Int[Array, "B S"], input_length: Int[Array, " B"],
                max_length: int) -> tuple[Prefix, Cache]:
        """The prefix to continue and a cache that covers all of it but its last token.

        `max_length` positions are allocated, the prefix included.
        """
        ...

    def extend(self, params: Params, tokens: Int[Array, "B T"], cache: Cache
               ) -> tuple[Float[Array, "B T V"], Cache]:
        """Float32 logits after each token, and the longer cache."""
        ...

    def roll_back(self, cache: Cache, length: Int[Array, " B"]) -> Cache:
        """The cache as it was when it covered `length` positions, no more than it covers now."""
        ...


# What a sampler's models have in common is done to all of them: `models` nests as parameters and caches do.

def each(function: Callable[..., Any], models: Any, *trees: Any) -> Any:
    """function(model, its part of each tree) for every model of a nest; what is no nest is every model's."""
    if type(models) is tuple:  # a model may be a named one
        nests = (tree if type(tree) is tuple else (tree,) * len(models) for tree in trees)
        return tuple(each(function, *parts) for parts in zip(models, *nests, strict=True))
    return function(models, *trees)


def top(models: Any, tree: Any) -> Any:
    """The largest model's part of a nest."""
    return tree[-1] if type(models) is tuple else tree


# A model may be a member of a network: other members share its parameters and its cache, which are the
# network's, and `model.length(cache)` is what its own part of that covers. A nest holds the network.

def network_of(model: Any) -> Any:
    return getattr(model, "member_of", model)


def covered(model: Any, cache: Cache) -> Int[Array, " B"]:
    """How many positions the model's part of a cache covers."""
    return cache.length if network_of(model) is model else model.length(cache)


def roll_back(models: Any, caches: Cache, length: Int[AnyArray, " B"]) -> Cache:
    """Caches that cover `length` positions, or what they cover now if that is less."""
    def one(model: LanguageModel, cache: Cache) -> Cache:
        return model.roll_back(cache, jnp.minimum(cache.length, length))

    return each(one, models, caches)


def insert(models: Any, caches: Cache, fresh: Cache, slots: Int[AnyArray, " R"], like_fresh: bool) -> Cache:
    """`caches` [B, ...] with the rows `slots` replaced by those of `fresh` [R, ...]; a slot of B or more is
    left out. Buffers are as large as those of `caches`, or, with `like_fresh`, as those of `fresh`, which
    must then hold all of every row that is still read.
    """
    def one(model: LanguageModel, cache: Cache, new: Cache) -> Cache:
        own = getattr(model, "insert", None)
        return own(cache, new, slots, like_fresh) if own else insert_rows(cache, new, slots, like_fresh)

    return each(one, models, caches, fresh)


def insert_rows(old: Any, new: Any, slots: Int[AnyArray, " R"], like_fresh: bool) -> Any:
    """insert() of a tree of arrays that all begin with the axis of rows."""
    def one(old: Array, new: Array) -> Array:
        sizes = (new if like_fresh else old).shape[1:]
        return fitted(old, sizes).at[slots].set(fitted(new, sizes), mode="drop")

    return jax.tree.map(one, old, new)


def fitted(x: Array, sizes: tuple[int, ...]) -> Array:
    """x [B, ...] cut or padded with zeros at the end of each axis but the first: [B, *sizes]."""
    x = x[:, *(slice(size) for size in sizes)]
    return jnp.pad(x, [(0, 0), *((0, size - own) for size, own in zip(sizes, x.shape[1:], strict=True))])
