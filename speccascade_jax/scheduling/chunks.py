"""Prompts read a chunk at a time, so that running rows do not wait until a long prompt is read as a whole.

A decoder-only model reads its prompt as it reads what follows: extend() by one chunk after the other. Others
read theirs as a whole in prefill(): an encoder sees all of its source at once, and a drafter of another
vocabulary reads the prompt in its own tokens.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int

from speccascade_jax.core.loop import State
from speccascade_jax.core.nests import each, roll_back
from speccascade_jax.core.protocols import AnyArray, Cache, Counts, Params, Prefix, Rows, Sampler
from speccascade_jax.core.rounds import noise_sizes_of, step
from speccascade_jax.vocabularies.translated import Translated


def continues(model: Any, params: Params) -> bool:
    """Whether a model continues the tokens of its prompt, and may read them chunk by chunk."""
    if isinstance(model, Translated):
        return False
    two = jax.ShapeDtypeStruct((1, 2), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    prefix, _ = jax.eval_shape(lambda params, *arguments: model.prefill(params, *arguments, 3), params, *two)
    return prefix.tokens.shape == (1, 2)


def any_continues(sampler: Sampler, params: Params) -> bool:
    """Whether any of a sampler's models may read its prompt chunk by chunk."""
    return any(jax.tree.leaves(each(continues, sampler.models, params)))


@dataclasses.dataclass(frozen=True)
class Blank:
    """A model of which only an empty cache is needed."""

    model: Any

    def prefill(
        self, params: Params, inputs: Int[AnyArray, "B S"], input_length: Int[AnyArray, " B"], max_length: int
    ) -> tuple[Prefix, Cache]:
        if not continues(self.model, params):
            return self.model.prefill(params, inputs, input_length, max_length)
        _, cache = self.model.prefill(params, inputs[:, :1], jnp.minimum(input_length, 1), max_length)
        return Prefix(jnp.asarray(inputs), jnp.asarray(input_length)), cache


@dataclasses.dataclass(frozen=True)
class Unread:
    """`sampler` for core.loop.begin(), where models that may read chunk by chunk read nothing yet."""

    sampler: Sampler

    @property
    def models(self) -> Any:
        return each(Blank, self.sampler.models)

    @property
    def width(self) -> int:
        return self.sampler.width

    @property
    def level(self) -> int:
        return self.sampler.level

    @property
    def overhang(self) -> int:
        return self.sampler.overhang

    @property
    def noise_sizes(self) -> tuple[tuple[int, ...], ...]:
        return noise_sizes_of(self.sampler)

    @property
    def verifications(self) -> Any:
        return getattr(self.sampler, "verifications", ())

    def plain(self, counts: Counts) -> dict[str, Any]:
        return self.sampler.plain(counts)

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> Any:
        return step(self.sampler, params, caches, rows, eos_id)


def read_chunk(
    sampler: Sampler, params: Params, state: State, tokens: Int[AnyArray, "B C"], start: Int[AnyArray, ""]
) -> State:
    """The state, which began with Unread, after reading `tokens`, the columns of all prompts from `start` on.
    Each row has already read its prompt up to there, or to the prompt's end if that comes first."""

    def advanced(model: Any, weights: Params, cache: Cache) -> Cache:
        if not continues(model, weights):
            return cache
        cache = roll_back(model, cache, jnp.full_like(state.rows.start, start))
        return roll_back(model, model.extend(weights, tokens, cache)[1], state.rows.start - 1)

    return state._replace(caches=each(advanced, sampler.models, params, state.caches))
