"""Building blocks for the rounds of samplers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from speccascade_jax.core.nests import covered
from speccascade_jax.core.protocols import (
    Block,
    Cache,
    Counts,
    LanguageModel,
    Origin,
    Params,
    Rows,
    Sampler,
    ability_of,
)
from speccascade_jax.core.randomness import Role
from speccascade_jax.core.verification import Draft, Verdict

Array = jax.Array


@partial(jax.jit, static_argnums=(0, 4))
def step(sampler: Sampler, params: Params, caches: Cache, rows: Rows, eos_id: int) -> Any:
    """sampler.step(), traced only once for all levels and loops that use it."""
    with jax.named_scope(f"level_{sampler.level}"):
        return sampler.step(params, caches, rows, eos_id)


def is_greedy(rows: Rows) -> Bool[Array, "B 1 1"]:
    return (rows.options.temperature < jnp.finfo(jnp.float32).tiny)[:, None, None]


def uniforms(
    rows: Rows, level: int, role: Role, count: int, by_round: bool = False
) -> Float[Array, "B count"]:
    """The rows' random numbers for `count` positions from rows.start on or, with `by_round`, for a round that
    begins there."""
    return rows.noise.at(rows.start, level, role, count, by_round)


def noise_sizes_of(sampler: Sampler) -> tuple[tuple[int, ...], ...]:
    """The `sizes` of randomness.noise, for each sampler from the innermost drafter up to this one. A sampler
    that contains others declares them in `noise_sizes`; otherwise all numbers belong to positions."""
    sizes = ability_of(sampler, "noise_sizes")
    return ((),) * (sampler.level + 1) if sizes is None else sizes


def read(
    model: LanguageModel, params: Params, cache: Cache, rows: Rows, behind: int, draft: Int[Array, "B G"]
) -> tuple[Float[Array, "B G+1 V"], Cache]:
    """The logits after the last committed token and after each of `draft`, and the new cache. The given cache
    may lack up to `behind` committed tokens besides the last."""
    tokens, name = jnp.concatenate([rows.recent[:, -1 - behind :], draft], axis=1), type(model).__name__
    if not behind:
        with jax.named_scope(name):
            return model.extend(params, tokens, cache)
    lacks = jnp.clip(rows.start - 1 - covered(model, cache), 0, behind)[:, None]  # more in finished rows
    column = jnp.arange(tokens.shape[1])
    tokens = jnp.take_along_axis(tokens, behind - lacks + column, axis=1, mode="clip")
    with jax.named_scope(name):
        logits, cache = model.extend(params, tokens, cache)
    return jnp.take_along_axis(logits, (lacks + column[:-behind])[..., None], axis=1), cache


def written(
    draft: Draft, origin: Int[Array, "B N"], verdict: Verdict, level: int
) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """The round's tokens (the accepted draft and the next token) and their origins."""
    column, stop = jnp.arange(origin.shape[1]), verdict.num_accepted[:, None]
    tokens = jnp.where(column == stop, verdict.next_token[:, None], jnp.pad(draft.tokens, ((0, 0), (0, 1))))
    next_origin = jnp.where(stop == draft.size[:, None], Origin.BONUS.at(level), Origin.CORRECTION.at(level))
    kept = origin - origin % len(Origin) + Origin.DRAFT  # keeps the writer's level
    return tokens, jnp.where(column < stop, kept, next_origin).astype(jnp.int32)


def append(drafted: Block, block: Block) -> Block:
    """`drafted` with `block` written at each row's size."""
    placed = [placed_at(old, new, drafted.size) for old, new in zip(drafted[:-1], block[:-1], strict=True)]
    return Block._make((*placed, drafted.size + block.size))


def placed_at(old: Array, new: Array, start: Int[Array, " B"]) -> Array:
    """Returns old [B, L, ...] with new [B, N, ...] written at each row's `start`; entries past L are
    dropped."""
    column = jnp.arange(old.shape[1])
    for n in range(new.shape[1]):
        here = (column == (start + n)[:, None]).reshape(*old.shape[:2], *(1,) * (old.ndim - 2))
        old = jnp.where(here, new[:, n : n + 1], old)
    return old


def after(block: Block, recent: Int[Array, "B R"]) -> Int[Array, "B R"]:
    """The last R tokens of each row after `block`, given those before it in `recent`."""
    tokens = jnp.concatenate([recent, block.tokens], axis=1)
    return jnp.take_along_axis(tokens, block.size[:, None] + jnp.arange(recent.shape[1]), axis=1)


def add(a: Counts, b: Counts) -> Counts:
    return jax.tree.map(jnp.add, a, b)


def cut_after(tokens: Int[Array, "B N"], size: Int[Array, " B"], eos_id: int) -> Int[Array, " B"]:
    """`size`, reduced so that the tokens end with the first eos_id."""
    count = 1 + jnp.arange(tokens.shape[1])
    ends = jnp.where((tokens == eos_id) & (count <= size[:, None]), count, size[:, None])
    return jnp.min(ends, axis=1, initial=tokens.shape[1])
