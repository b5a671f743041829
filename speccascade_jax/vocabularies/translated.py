"""Wraps a drafter with another vocabulary as a LanguageModel over the verifier's (Timor et al., ICML 2025,
arXiv 2502.05202).

It translates token ids on input and returns distributions over the target vocabulary, so every sampler and
rule works unchanged. The distributions depend on the tables, which vocabularies.joining makes from two
tokenizers:

    TLI (Algorithm 4)    q(t) of the tokens that both have, renormalised; the head has no other columns
    SLRS (Algorithm 3)   psi(t), how probable it is that what the drafter writes begins with t
    union (Algorithm 1)  q over all tokens of both: the verifier gives the drafter's own no mass (`Resized`)
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Float, Int

from speccascade_jax.core.nests import covered, insert, insert_rows, network_of, roll_back
from speccascade_jax.core.protocols import AnyArray, Cache, Params, Prefix
from speccascade_jax.models.cache import write
from speccascade_jax.models.layers import Branches

Array = jax.Array
NONE = np.iinfo(np.int32).max  # the column of a token that the drafter lacks
CHUNK = 16  # most tokens that a drafter reads at once


class Source(NamedTuple):
    """The input of a translated model."""

    tokens: Int[AnyArray, "B S"]  # in the verifier's tokens
    drafter_tokens: Int[AnyArray, "B R"]  # in the drafter's tokens
    drafter_length: Int[AnyArray, " B"]


class Tables(NamedTuple):
    """Maps a target vocabulary of V tokens to a drafter's vocabulary of D tokens."""

    place: Int[AnyArray, " V"]  # the token's column in the drafter's logits, or NONE
    spelled: Int[AnyArray, "V W"]  # the token's text in drafter tokens
    sizes: Int[AnyArray, " V"]  # the number of those drafter tokens, 1 .. W


class Strings(NamedTuple):
    """The texts that a drafter is asked to continue to obtain psi, the distribution of the first target token
    of what it writes: a tree of N + 1 nodes, whose node 0 is the empty text. They are read in C parts of M
    nodes."""

    tokens: Int[AnyArray, "C M"]  # each part's nodes, which include all their ancestors
    depth: Int[AnyArray, "C M"]  # as in Branches
    within: Int[AnyArray, "C M M"]
    slot: Int[AnyArray, " N"]  # the place of nodes 1 .. N among the parts' nodes
    parent: Int[AnyArray, " N1"]
    token: Int[AnyArray, " N1"]  # the last drafter token of each text
    goes: Int[AnyArray, "N1 D"]  # the first target token if that drafter token follows; V: none, or undecided


class TranslatedParams(NamedTuple):
    drafter: Params  # the model's parameters; an untied head has only the chosen columns
    head: Any  # the chosen columns [D, I] of a tied head; None for an untied head
    tables: Tables
    strings: Strings | None = None  # needed for psi


class TranslatedCache(NamedTuple):
    """The drafter's cache and its alignment with target tokens. Entries of `positions` past `length` are
    scratch."""

    drafter: Cache
    positions: Int[Array, "B L"]  # the number of drafter tokens of the first n target tokens
    begin: Int[Array, " B"]  # the position of the prefix's last token
    first: Int[Array, " B"]  # that token in the drafter's prefix
    limit: Int[Array, " B"]  # most drafter positions that the cache can cover
    length: Int[Array, " B"]  # target tokens covered


@dataclasses.dataclass(frozen=True)
class Translated:
    """Wraps `model`: tokens and logits are in the target vocabulary.

    A target token that the model lacks is read as the drafter tokens of its text. The cache's `positions` say
    where each target token ends, so that a rollback is still a length. A text that needs far more drafter
    tokens than usual is not read to its end; from there on, all tokens are equally likely.
    """

    model: Any  # a LanguageModel, or a member of a network
    vocab_size: int  # the target's; with `union`, the size of both together
    longest: int  # most drafter tokens of a target token
    stretch: float  # average number of drafter tokens of a target token
    start_id: int | None  # first token of the verifier's outputs; None: they continue the prompt
    number: int = 0  # distinguishes models of the same shape

    @property
    def config(self) -> Any:
        return self.model.config

    def reads(self, width: int) -> int:
        """The number of drafter tokens allotted to a source of `width` target tokens."""
        return -(-math.ceil(width * self.stretch) // 16) * 16

    def needs(self, count: int) -> int:
        """The width, in target tokens, of a source with `count` drafter tokens."""
        return 0 if count == 0 else math.floor((count - 1) // 16 * 16 / self.stretch) + 1

    def prefill(
        self, params: TranslatedParams, inputs: Source, input_length: Int[AnyArray, " B"], max_length: int
    ) -> tuple[Prefix, TranslatedCache]:
        """The prefix in target tokens, and a cache in drafter tokens that covers all of it but the last
        token."""
        rows = inputs.drafter_tokens.shape[0]
        prefix = Prefix(jnp.asarray(inputs.tokens), jnp.asarray(input_length))
        if self.start_id is not None:
            prefix = Prefix(jnp.full((rows, 1), self.start_id, jnp.int32), jnp.ones((rows,), jnp.int32))
        drafter_length = jnp.where(input_length > 0, inputs.drafter_length, 0)

        def begun(size: int) -> tuple[Prefix, Cache]:
            return self.model.prefill(params.drafter, inputs.drafter_tokens, drafter_length, size)

        written = math.ceil((max_length - prefix.tokens.shape[1]) * self.stretch)
        widest = jax.eval_shape(lambda: begun(inputs.drafter_tokens.shape[1] + 1)[0]).tokens.shape[1]
        drafter_prefix, drafter_cache = begun(widest + written + CHUNK)
        covers = jnp.maximum(drafter_prefix.length - 1, 0)
        last = covers[:, None]
        begin = jnp.maximum(prefix.length - 1, 0)
        return prefix, TranslatedCache(
            drafter_cache,
            jnp.broadcast_to(covers[:, None], (rows, max_length + 1)),
            begin,
            jnp.take_along_axis(drafter_prefix.tokens, last, axis=1)[:, 0],
            covers + 1 + written,
            begin,
        )

    def extend(
        self, params: TranslatedParams, tokens: Int[AnyArray, "B T"], cache: TranslatedCache
    ) -> tuple[Float[Array, "B T V"], TranslatedCache]:
        if params.strings is not None:
            cache, laws = lax.scan(partial(self._extend_psi, params), cache, jnp.asarray(tokens).T)
            return jnp.moveaxis(laws, 0, 1), cache
        ids, ends, cache = self._translated(params.tables, tokens, cache)
        if self.longest == 1:
            logits, drafter_cache = self._extend_drafter(params, ids[..., 0], cache.drafter)
            return self._placed(params.tables, logits), cache._replace(drafter=drafter_cache)
        logits, drafter_cache = self._read(params, ids, ends, cache.drafter)
        return self._placed(params.tables, logits), cache._replace(drafter=drafter_cache)

    def roll_back(self, cache: TranslatedCache, length: Int[AnyArray, " B"]) -> TranslatedCache:
        length = jnp.asarray(length)
        drafter_length = jnp.take_along_axis(cache.positions, jnp.maximum(length, 0)[:, None], axis=1)[:, 0]
        return cache._replace(
            drafter=roll_back(network_of(self.model), cache.drafter, drafter_length), length=length
        )

    def insert(
        self, cache: TranslatedCache, fresh: TranslatedCache, slots: Int[AnyArray, " R"], like_fresh: bool
    ) -> TranslatedCache:
        drafter_cache = insert(network_of(self.model), cache.drafter, fresh.drafter, slots, like_fresh)
        rest = insert_rows(cache._replace(drafter=None), fresh._replace(drafter=None), slots, like_fresh)
        return rest._replace(drafter=drafter_cache)

    def _translated(
        self, tables: Tables, tokens: Int[AnyArray, "B T"], cache: TranslatedCache
    ) -> tuple[Int[Array, "B T W"], Int[Array, "B T"], TranslatedCache]:
        """The drafter tokens of `tokens`, the drafter position at the end of each, and the cache with these
        positions."""
        ids, count = tables.spelled[tokens], tables.sizes[tokens]
        begins = cache.length[:, None] + jnp.arange(tokens.shape[1]) == cache.begin[:, None]
        ids = jnp.where(begins[..., None], cache.first[:, None, None], ids)
        count = jnp.where(begins, 1, count)
        before = covered(self.model, cache.drafter)[:, None]
        ends = before + jnp.cumsum(count, axis=1)
        fits = ends <= cache.limit[:, None]
        ends = before + jnp.cumsum(jnp.where(fits, count, 0), axis=1)
        return (
            ids,
            ends,
            cache._replace(
                positions=write(cache.positions, ends, cache.length + 1),
                length=cache.length + tokens.shape[1],
            ),
        )

    def _read(
        self,
        params: TranslatedParams,
        ids: Int[Array, "B T W"],
        ends: Int[Array, "B T"],
        drafter_cache: Cache,
    ) -> tuple[Float[Array, "B T I"], Cache]:
        """The drafter's logits after the last drafter token of each target token. `ends` has the drafter
        position at the end of each. The tokens are read CHUNK at a time, until every row has read all of its
        own."""
        rows, count, width = ids.shape
        start, chunk = covered(self.model, drafter_cache), min(count, CHUNK)
        ends = ends - start[:, None]
        total, begins = ends[:, -1], jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
        step = jnp.arange(count * width + chunk)
        which = jnp.minimum(jnp.sum(step[:, None] >= ends[:, None, :], axis=-1), count - 1)
        within = jnp.clip(step - jnp.take_along_axis(begins, which, axis=1), 0, width - 1)
        flat = jnp.take_along_axis(ids.reshape(rows, -1), which * width + within, axis=1)

        def read_on(carry: Any) -> Any:
            done, drafter_cache, gathered = carry
            logits, drafter_cache = self._extend_drafter(
                params, lax.dynamic_slice_in_dim(flat, done, chunk, axis=1), drafter_cache
            )
            at = ends - 1 - done
            here = (at >= 0) & (at < chunk) & (ends > begins)
            new = jnp.take_along_axis(logits, jnp.clip(at, 0, chunk - 1)[..., None], axis=1)
            drafter_cache = roll_back(
                network_of(self.model), drafter_cache, start + jnp.minimum(done + chunk, total)
            )
            return done + chunk, drafter_cache, jnp.where(here[..., None], new, gathered)

        shape = jax.eval_shape(lambda: self._extend_drafter(params, flat[:, :1], drafter_cache)[0]).shape
        carry = jnp.int32(0), drafter_cache, jnp.zeros((rows, count, shape[-1]))
        _, drafter_cache, gathered = lax.while_loop(lambda carry: carry[0] < jnp.max(total), read_on, carry)
        return gathered, drafter_cache

    def _extend_psi(
        self, params: TranslatedParams, cache: TranslatedCache, token: Int[Array, " B"]
    ) -> tuple[TranslatedCache, Float[Array, "B V"]]:
        """Reads one target token: the new cache, and log psi of the next token."""
        ids, ends, cache = self._translated(params.tables, token[:, None], cache)
        root, drafter_cache = self._read(params, ids, ends, cache.drafter)
        return cache._replace(drafter=drafter_cache), self._psi(params, params.strings, root, drafter_cache)

    def _psi(
        self, params: TranslatedParams, s: Any, root: Float[Array, "B 1 D"], drafter_cache: Cache
    ) -> Float[Array, "B V"]:
        """log psi: sums, for each target token, the probability of each text times that of its next drafter
        token."""

        def part(nodes: Any) -> Array:
            tokens, *tree = nodes
            return self.model.extend_branches(params.drafter, tokens, drafter_cache, Branches(*tree))

        rows = root.shape[0]
        logits = jnp.moveaxis(lax.map(part, (s.tokens, s.depth, s.within)), 1, 0)
        logits = logits.reshape(rows, -1, root.shape[-1])
        q = jax.nn.log_softmax(jnp.concatenate([root, logits[:, s.slot]], axis=1), axis=-1)
        step = jnp.where(jnp.arange(len(s.parent)) > 0, q[:, s.parent, s.token], 0.0)
        mass = lax.fori_loop(
            0,
            jnp.max(s.depth),
            lambda _, mass: step.at[:, 1:].add(mass[:, s.parent[1:]]),
            jnp.zeros_like(step),
        )
        leaving = jnp.exp(q + mass[..., None]).reshape(rows, -1)
        psi = jax.vmap(lambda x: jax.ops.segment_sum(x, s.goes.reshape(-1), self.vocab_size + 1))(leaving)
        some = jnp.sum(psi[:, :-1], axis=-1, keepdims=True) > 0
        return jnp.where(some, jnp.log(psi[:, :-1]), 0.0)

    def _extend_drafter(
        self, params: TranslatedParams, ids: Int[Array, "B T"], drafter_cache: Cache
    ) -> tuple[Float[Array, "B T I"], Cache]:
        if params.head is None:
            return self.model.extend(params.drafter, ids, drafter_cache)
        return self.model.extend(params.drafter, ids, drafter_cache, table=params.head)

    def _placed(self, tables: Tables, logits: Float[Array, "B T I"]) -> Float[Array, "B T V"]:
        """Each target token's logit; -inf for tokens that the model lacks."""
        none = jnp.full((*logits.shape[:-1], 1), -jnp.inf)
        return jnp.take(jnp.concatenate([logits, none], axis=-1), tables.place, axis=-1, mode="clip")


@dataclasses.dataclass(frozen=True)
class Resized:
    """Wraps `model` so that it has `vocab_size` logits and writes only the first `known` tokens. Used for
    padded vocabularies of one tokenizer, and for a larger vocabulary that begins with the model's."""

    model: Any
    vocab_size: int
    known: int

    @property
    def config(self) -> Any:
        return self.model.config

    def prefill(
        self, params: Params, inputs: Int[AnyArray, "B S"], input_length: Int[AnyArray, " B"], max_length: int
    ) -> tuple[Prefix, Cache]:
        return self.model.prefill(params, inputs, input_length, max_length)

    def extend(
        self, params: Params, tokens: Int[AnyArray, "B T"], cache: Cache
    ) -> tuple[Float[Array, "B T V"], Cache]:
        """Logits after a token that the model lacks are never used, because verification rejects that
        token."""
        logits, cache = self.model.extend(params, jnp.where(tokens < self.known, tokens, 0), cache)
        more = ((0, 0), (0, 0), (0, self.vocab_size - self.known))
        return jnp.pad(logits[..., : self.known], more, constant_values=-jnp.inf), cache

    def roll_back(self, cache: Cache, length: Int[AnyArray, " B"]) -> Cache:
        return self.model.roll_back(cache, length)

    def insert(self, cache: Cache, fresh: Cache, slots: Int[AnyArray, " R"], like_fresh: bool) -> Cache:
        return insert(self.model, cache, fresh, slots, like_fresh)

    def segment(self, cache: Cache, row: Int[AnyArray, ""], start: Int[AnyArray, ""], size: int) -> Any:
        return self.model.segment(cache, row, start, size)

    def with_segment(
        self, cache: Cache, segment: Any, rows: Bool[AnyArray, " B"], start: Int[AnyArray, ""]
    ) -> Cache:
        return self.model.with_segment(cache, segment, rows, start)
