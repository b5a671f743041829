"""Chunked prefill: running rows do not wait for a whole long prompt, and shared prefixes are read once.

A decoder-only model reads its prompt with extend(), one chunk at a time, in its own tokens. An encoder reads
all of its source at once, in prefill().
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from speccascade_jax.core.nests import each, network_of, roll_back
from speccascade_jax.core.protocols import (
    AnyArray,
    Cache,
    Counts,
    Params,
    Prefix,
    Rows,
    Sampler,
    ability_of,
)
from speccascade_jax.core.rounds import noise_sizes_of, step
from speccascade_jax.vocabularies.translated import Resized, Translated


def continues(model: Any, params: Params) -> bool:
    """Whether a model's output continues its prompt, so that it can read the prompt in chunks."""
    if isinstance(model, Translated):
        return continues(model.model, params.drafter)
    if not jax.tree.leaves(params):  # it computes nothing from its prompt
        return False
    two = jax.ShapeDtypeStruct((1, 2), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    prefix, _ = jax.eval_shape(lambda params, *arguments: model.prefill(params, *arguments, 3), params, *two)
    return prefix.tokens.shape == (1, 2)


def any_continues(sampler: Sampler, params: Params) -> bool:
    """Whether any model of a sampler can read its prompt in chunks."""
    return any(jax.tree.leaves(each(continues, sampler.models, params)))


@dataclasses.dataclass(frozen=True)
class Blank:
    """Wraps a model whose prefill() only has to return an empty cache."""

    model: Any

    def prefill(
        self, params: Params, inputs: Any, input_length: Int[AnyArray, " B"], max_length: int
    ) -> tuple[Prefix, Cache]:
        model = self.model
        if not continues(model, params):
            return model.prefill(params, inputs, input_length, max_length)
        if isinstance(model, Translated):
            blank = dataclasses.replace(model, model=Blank(model.model))
            return blank.prefill(params, inputs, input_length, max_length)
        _, cache = model.prefill(params, inputs[:, :1], jnp.minimum(input_length, 1), max_length)
        return Prefix(jnp.asarray(inputs), jnp.asarray(input_length)), cache


@dataclasses.dataclass(frozen=True)
class Unread:
    """Wraps a sampler for core.loop.begin(), so that models that read in chunks read nothing yet."""

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
        return ability_of(self.sampler, "verifications")

    def plain(self, counts: Counts) -> dict[str, Any]:
        return self.sampler.plain(counts)

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> Any:
        return step(self.sampler, params, caches, rows, eos_id)


@dataclasses.dataclass(frozen=True)
class Reader:
    """The models of a sampler that read a prompt in chunks and in the same vocabulary."""

    foreign: Translated | None  # the model whose vocabulary is read; None: the verifier's vocabulary
    models: Any  # the sampler's models
    reads: Any  # whether each of them is read here, in the same nest

    @property
    def stores(self) -> bool:
        """Whether cache segments of all its models can be kept for other rows."""
        return all(jax.tree.leaves(each(lambda model, reads: not reads or keeps(model), *self._nests)))

    @property
    def _nests(self) -> tuple[Any, Any]:
        return self.models, self.reads

    def tokens(self, request: Any) -> list[int]:
        """A request's prompt in this reader's vocabulary."""
        return request.tokens if self.foreign is None else request.foreign.get(self.foreign, [])

    def width(self, width: int) -> int:
        """The width of its inputs if the verifier's inputs have `width`."""
        return width if self.foreign is None else self.foreign.reads(width)

    def read(
        self,
        params: Params,
        caches: Cache,
        end: Int[AnyArray, " B"],
        tokens: Int[AnyArray, "B C"],
        start: Int[AnyArray, ""],
    ) -> Cache:
        """Returns the caches after the models have read `tokens`, columns start .. start+C-1 of all prompts.
        Each row has already read its prompt up to `start`, or up to the prompt's `end` if that comes
        first."""

        def read_on(model: Any, weights: Params, cache: Cache, end: Int[AnyArray, " B"]) -> Cache:
            cache = roll_back(model, cache, jnp.full_like(end, start))
            return roll_back(model, model.extend(weights, tokens, cache)[1], end)

        def advanced(model: Any, reads: bool, weights: Params, cache: Cache) -> Cache:
            if not reads:
                return cache
            if not isinstance(model, Translated):
                return read_on(model, weights, cache, end)
            inner, drafter_end = network_of(model.model), cache.positions[:, 0]
            return cache._replace(drafter=read_on(inner, weights.drafter, cache.drafter, drafter_end))

        return each(advanced, *self._nests, params, caches)

    def segments(self, caches: Cache, row: Int[AnyArray, ""], start: Int[AnyArray, ""], size: int) -> Any:
        """The contents of the models' caches at positions start .. start+size-1 of a row; None for models
        that are not read here."""

        def segment(model: Any, reads: bool, cache: Cache) -> Any:
            if not reads:
                return None
            if isinstance(model, Translated):
                return network_of(model.model).segment(cache.drafter, row, start, size)
            return model.segment(cache, row, start, size)

        return each(segment, *self._nests, caches)

    def with_segments(
        self, caches: Cache, segments: Any, rows: Bool[AnyArray, " B"], start: Int[AnyArray, ""]
    ) -> Cache:
        """Returns the caches with `segments` written at `start` in the chosen rows, whose caches then end
        there."""

        def placed(model: Any, reads: bool, cache: Cache, segment: Any) -> Cache:
            if not reads:
                return cache
            if not isinstance(model, Translated):
                return model.with_segment(cache, segment, rows, start)
            drafter = network_of(model.model).with_segment(cache.drafter, segment, rows, start)
            return cache._replace(drafter=drafter)

        return each(placed, *self._nests, caches, segments)


def keeps(model: Any) -> bool:
    """Whether a model's cache can be cut into segments."""
    if isinstance(model, Resized | Translated):
        return keeps(model.model)
    return hasattr(network_of(model), "segment")


def readers_of(sampler: Sampler, params: Params) -> tuple[Reader, ...]:
    """One reader for each vocabulary in which some model reads its prompt in chunks."""
    models = sampler.models

    def vocabulary(model: Any, weights: Params) -> list[Translated | None]:
        """The model's vocabulary in a list; an empty list if it does not read in chunks."""
        return [model if isinstance(model, Translated) else None] if continues(model, weights) else []

    read = each(vocabulary, models, params)
    known = dict.fromkeys(foreign for of_model in leaves_of(models, read) for foreign in of_model)
    return tuple(
        Reader(foreign, models, each(lambda _, of_model, foreign=foreign: foreign in of_model, models, read))
        for foreign in known
    )


def leaves_of(models: Any, tree: Any) -> list[Any]:
    """Each model's part of a nest, in order."""
    parts: list[Any] = []
    each(lambda _, part: parts.append(part), models, tree)
    return parts
