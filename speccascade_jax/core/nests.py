"""Operations on all models of a nest. A sampler's models, parameters and caches have the same nesting.

A model may be a member of a network. Its parameters and cache are then those of the network, shared with the
other members, and `model.length(cache)` is the length that its own part covers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from speccascade_jax.core.protocols import AnyArray, Cache, LanguageModel

Array = jax.Array


def each(function: Callable[..., Any], models: Any, *trees: Any) -> Any:
    """function(model, its part of each tree) for every model of a nest. A tree that is not a nest is passed
    whole to every model."""
    if type(models) is tuple:  # a model may be a named tuple
        nests = (tree if type(tree) is tuple else (tree,) * len(models) for tree in trees)
        return tuple(each(function, *parts) for parts in zip(models, *nests, strict=True))
    return function(models, *trees)


def top(models: Any, tree: Any) -> Any:
    """The largest model's part of a nest."""
    return tree[-1] if type(models) is tuple else tree


def network_of(model: Any) -> Any:
    return getattr(model, "member_of", model)


def covered(model: Any, cache: Cache) -> Int[Array, " B"]:
    """The number of positions that the model's part of a cache covers."""
    return cache.length if network_of(model) is model else model.length(cache)


def roll_back(models: Any, caches: Cache, length: Int[AnyArray, " B"]) -> Cache:
    """Rolls caches back to `length` positions; those that cover fewer are not changed."""

    def shortened(model: LanguageModel, cache: Cache) -> Cache:
        return model.roll_back(cache, jnp.minimum(cache.length, length))

    return each(shortened, models, caches)


def insert(models: Any, caches: Cache, fresh: Cache, slots: Int[AnyArray, " R"], like_fresh: bool) -> Cache:
    """Returns `caches` [B, ...] with the rows `slots` replaced by those of `fresh` [R, ...]; slots of B or
    more are ignored. Buffers are as large as those of `caches`, or, with `like_fresh`, as those of `fresh`,
    which must then be long enough for every row that is still read.
    """

    def merged(model: LanguageModel, cache: Cache, new: Cache) -> Cache:
        model_insert = getattr(model, "insert", None)
        return (
            model_insert(cache, new, slots, like_fresh)
            if model_insert
            else insert_rows(cache, new, slots, like_fresh)
        )

    return each(merged, models, caches, fresh)


def insert_rows(old: Any, new: Any, slots: Int[AnyArray, " R"], like_fresh: bool) -> Any:
    """insert() for a tree of arrays whose first axis is that of rows."""

    def replaced(old: Array, new: Array) -> Array:
        sizes = (new if like_fresh else old).shape[1:]
        return fitted(old, sizes).at[slots].set(fitted(new, sizes), mode="drop")

    return jax.tree.map(replaced, old, new)


def by_row(mask: Bool[Array, " B"], new: Any, old: Any) -> Any:
    """`new` in the rows where `mask` is true, `old` in the others; both are trees of arrays [B, ...]."""
    return jax.tree.map(lambda x, y: jnp.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), x, y), new, old)


def fitted(x: Array, sizes: tuple[int, ...]) -> Array:
    """x [B, ...], cut or padded with zeros at the end of each axis except the first, to [B, *sizes]."""
    x = x[:, *(slice(size) for size in sizes)]
    return jnp.pad(x, [(0, 0), *((0, size - width) for size, width in zip(sizes, x.shape[1:], strict=True))])
