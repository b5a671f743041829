"""Verification of drafts without distributions, and drafts from outside the compiled loop: string-level exact
match (Timor et al. 2025, arXiv 2502.05202, Algorithm 2).
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from speccascade_jax.core.protocols import AnyArray, Block, Cache, Counts, Origin, Params, Prefix, Rows
from speccascade_jax.core.rules import Scores
from speccascade_jax.core.samplers.adaptive import Narrowed
from speccascade_jax.core.verification import Draft

Array = jax.Array


class Proposals(NamedTuple):
    """The next drafts, put here between two rounds."""

    tokens: Int[AnyArray, "B G"]
    size: Int[AnyArray, " B"]  # how many of them
    passes: Int[AnyArray, " B"]  # of the drafter that wrote them
    length: Int[AnyArray, " B"]


class Drafts(NamedTuple):
    """Tokens proposed after the committed ones by a drafter without distributions."""

    tokens: Int[AnyArray, "B G"]
    size: Int[AnyArray, " B"]  # 0 .. G: how many of them
    passes: Int[AnyArray, " B"]  # of the drafter's model


@dataclasses.dataclass(frozen=True)
class Proposed:
    """A stand-in for a drafter's model, without parameters; its cache contains the drafts."""

    vocab_size: int
    block_size: int  # drafts of a round
    start_id: int | None  # what the verifier's outputs begin with; None: its prompt
    from_host: ClassVar[bool] = True

    def params_from(self, params_of: Any) -> Params:
        return ()

    def prefill(
        self, params: Params, inputs: Int[AnyArray, "B S"], input_length: Int[AnyArray, " B"], max_length: int
    ) -> tuple[Prefix, Proposals]:
        rows = inputs.shape[0]
        prefix = Prefix(jnp.asarray(inputs), jnp.asarray(input_length))
        if self.start_id is not None:
            prefix = Prefix(jnp.full((rows, 1), self.start_id, jnp.int32), jnp.ones((rows,), jnp.int32))
        nothing = jnp.zeros((rows,), jnp.int32)
        return prefix, Proposals(
            jnp.zeros((rows, self.block_size), jnp.int32), nothing, nothing, jnp.maximum(prefix.length - 1, 0)
        )

    def extend(
        self, params: Params, tokens: Int[AnyArray, "B T"], cache: Proposals
    ) -> tuple[Float[Array, "B T V"], Proposals]:
        """Uniform distributions, because nothing is known about the continuation of other tokens."""
        logits = jnp.zeros((*tokens.shape, self.vocab_size))
        return logits, cache._replace(length=cache.length + tokens.shape[1])

    def roll_back(self, cache: Proposals, length: Int[AnyArray, " B"]) -> Proposals:
        return cache._replace(length=jnp.asarray(length))

    def draft(
        self,
        params: Params,
        cache: Proposals,
        rows: Rows,
        limit: Int[Array, " B"],
        count: int,
        eos_id: int,
    ) -> tuple[Drafts, Proposals]:
        return Drafts(cache.tokens, jnp.minimum(cache.size, limit), cache.passes), cache


@dataclasses.dataclass(frozen=True)
class Matched(Narrowed):
    """Speculative with drafts that have no laws; its `drafter` holds a model whose draft(params, cache, rows,
    limit, count, eos_id) gives the Drafts: up to `limit` of `count` tokens, which depend on committed tokens
    alone.

    A draft's law is taken to be one-hot. So a lossless method accepts token x with probability p(x), as exact
    match with a sample of p does, and a rule refuses what p alone tells it to refuse. After the last draft
    comes a token of the verifier's own.
    """

    by_prefix: ClassVar[bool] = False  # after the last draft, a rule's target is another one

    @property
    def narrowest(self) -> int:
        drafter: Any = self.drafter
        return 0 if getattr(drafter.model, "sparse", False) else 1

    @property
    def proposed(self) -> bool:
        """Whether the drafts come from outside the compiled loop."""
        drafter: Any = self.drafter
        return getattr(drafter.model, "from_host", False)

    def _draft(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        limit = self.block_size if rows.want is None else jnp.minimum(self.block_size, rows.want - 1)
        limit = jnp.where(rows.room > 0, limit, 0)
        drafter: Any = self.drafter
        drafts, caches = drafter.model.draft(params, caches, rows, limit, self.block_size, eos_id)
        tokens = jnp.pad(drafts.tokens, ((0, 0), (0, 1)))
        laws = jax.nn.one_hot(tokens, self.verifier.vocab_size)
        block = Block(tokens, laws, laws, jnp.full_like(tokens, Origin.MODEL), drafts.size)
        return block, caches, jnp.where(rows.room > 0, drafts.passes, 0)

    def target(
        self, scores: Scores, rows: Rows, draft: Draft
    ) -> tuple[Float[Array, "B N V"], Int[Array, " B"]]:
        pi, deferred = super().target(scores, rows, draft)
        bonus = jnp.arange(pi.shape[1]) == draft.size[:, None]
        return jnp.where(bonus[..., None], scores.p_sampled, pi), deferred
