"""Samplers: what writes tokens together with the distribution each was drawn from.

So any sampler can draft for a larger model, and a hierarchy is a fold. Between steps every cache, at every
level, covers all committed tokens but the last; what lies at or past a cache's `length` is scratch. One
exception is named: the spared bonus pass (`Speculative.spares`).
"""

import dataclasses
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from speccascade_jax.core.methods import Method
from speccascade_jax.core.metrics import Counters
from speccascade_jax.core.rules import Scores
from speccascade_jax.core.sampling import Role, draw, token_probs
from speccascade_jax.core.typing import Cache, LanguageModel, Params, SamplingOptions, roll_back
from speccascade_jax.core.verification import Draft, Verdict, verify

Array = jax.Array
Counts = Any
NO_TOKEN = -1  # an end-of-sequence id that no token has


class Origin(IntEnum):
    """Who wrote a token."""

    DRAFT = 0       # drafted and accepted
    CORRECTION = 1  # drawn from the residual at a rejection
    BONUS = 2       # drawn from the target after a wholly accepted draft
    MODEL = 3       # a single model, decoding autoregressively


class Rows(NamedTuple):
    """What each row asked for, and where it stands when a sampler is asked for its next block."""

    noise: Float[Array, "B levels 2 L"]  # see sampling.noise
    options: SamplingOptions  # a value for each row
    alphas: Float[Array, "B K"]  # lenience of each verifier, from the smallest up
    methods: Int[Array, "B K"]   # which of each verifier's methods
    before: Int[Array, " B"]  # the last committed token but one; NO_TOKEN: nothing is written yet
    last: Int[Array, " B"]    # the last committed token
    start: Int[Array, " B"]   # the position of the next one
    room: Int[Array, " B"]    # how many tokens it may take; 0: the row is finished


class Block(NamedTuple):
    """Up to N tokens a row; those from `size` on are scratch."""

    tokens: Int[Array, "B N"]
    probs: Float[Array, "B N V"]  # the law each token was drawn from
    own: Float[Array, "B N V"]    # the same law built from untransformed distributions
    origin: Int[Array, "B N"]
    size: Int[Array, " B"]        # 0 .. min(N, room)


@runtime_checkable
class Sampler(Protocol):
    """Static and hashable."""

    @property
    def models(self) -> Any:
        """Its language models, a nest of tuples that `params` and `caches` follow."""
        ...

    @property
    def width(self) -> int:
        """N: the most tokens a step emits."""
        ...

    @property
    def level(self) -> int:
        """How many samplers draft below this one."""
        ...

    @property
    def overhang(self) -> int:
        """How many positions past the committed ones a step may write into its caches."""
        ...

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        """One block, cut after the first eos_id; the caches; what was counted, arrays [B, ...].

        On return the caches cover start + size - 1 positions.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """One model, one token a step. Counts its passes, [B]."""

    model: LanguageModel
    width: int = dataclasses.field(default=1, init=False)
    level: int = dataclasses.field(default=0, init=False)
    overhang: int = dataclasses.field(default=0, init=False)

    @property
    def models(self) -> LanguageModel:
        return self.model

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        return self._drawn(*self.model.extend(params, rows.last[:, None], caches), rows)

    def step_behind(self, params: Params, caches: Cache, rows: Rows) -> tuple[Block, Cache, Counts]:
        """step() for caches that may also lack the last token but one, which is then read first: what
        a spared bonus pass has left."""
        lacks = jnp.clip(rows.start - 1 - caches.length, 0, 1)  # a finished row may lack more
        tokens = jnp.stack([jnp.where(lacks > 0, rows.before, rows.last), rows.last], axis=1)
        logits, caches = self.model.extend(params, tokens, caches)
        logits = jnp.take_along_axis(logits, lacks[:, None, None], axis=1)
        return self._drawn(logits, caches, rows)

    def _drawn(self, logits: Float[Array, "B 1 V"], caches: Cache, rows: Rows) -> tuple[Block, Cache, Counts]:
        probs = token_probs(logits, rows.options)
        token = draw(uniforms(rows, self.level, Role.DRAW, 1)[:, 0], probs[:, 0])
        size = jnp.minimum(rows.room, 1)
        block = Block(token[:, None], probs, jax.nn.softmax(logits, axis=-1),
                      jnp.full_like(token, Origin.MODEL)[:, None], size)
        return block, roll_back(self.model, caches, rows.start - 1 + size), size


@dataclasses.dataclass(frozen=True)
class Speculative:
    """GenSpecSample (Narasimhan et al., Algorithm 4): `drafter` writes, `verifier` scores.

    The output follows method.target of the drafter's and the verifier's distributions; of several methods,
    rows.methods says which. Counts (the drafter's counts, its own Counters).
    """

    drafter: Sampler
    verifier: LanguageModel
    method: Method | tuple[Method, ...]
    block_size: int

    @property
    def models(self) -> tuple[Any, LanguageModel]:
        return self.drafter.models, self.verifier

    @property
    def methods(self) -> tuple[Method, ...]:
        return self.method if isinstance(self.method, tuple) else (self.method,)

    @property
    def width(self) -> int:
        return self.block_size + 1

    @property
    def level(self) -> int:
        return self.drafter.level + 1

    @property
    def overhang(self) -> int:
        return self.block_size + 1 + self.drafter.overhang

    @property
    def spares(self) -> bool:
        """The spared bonus pass: a lossless pi needs no q at the bonus position, so the drafter does not
        read its last token, and where that token is kept, the next draft begins with reading it."""
        return all(method.lossless for method in self.methods) and isinstance(self.drafter, Autoregressive)

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        size = self.block_size
        drafted, drafter_caches, drafter_counts = self._draft(params[0], caches[0], rows)
        draft = Draft(drafted.tokens[:, :size], drafted.probs)

        logits, verifier_cache = self.verifier.extend(
            params[1], jnp.concatenate([rows.last[:, None], draft.tokens], axis=1), caches[1])
        scores = Scores(drafted.own, jax.nn.softmax(logits, axis=-1), draft.probs,
                        token_probs(logits, rows.options), is_greedy(rows))

        pi, deferred = self._target(scores, rows, draft.tokens)
        own_pi, _ = self._target(scores._replace(q_sampled=scores.q, p_sampled=scores.p), rows, draft.tokens)

        verdict = verify(uniforms(rows, self.level, Role.ACCEPT, size),
                         uniforms(rows, self.level, Role.DRAW, size + 1), draft, pi)
        tokens, origin = written(draft, verdict)
        emitted = jnp.minimum(cut_after(tokens, verdict.num_accepted + 1, eos_id), rows.room)

        caches = roll_back(self.models, (drafter_caches, verifier_cache), rows.start - 1 + emitted)
        accepted = jnp.minimum(verdict.num_accepted, emitted)
        counts = Counters.of_round(rows.room > 0, size, accepted, emitted, deferred)
        return Block(tokens, pi, own_pi, origin, emitted), caches, (drafter_counts, counts)

    def _target(self, scores: Scores, rows: Rows, tokens: Int[Array, "B G"]
                ) -> tuple[Float[Array, "B N V"], Int[Array, " B"]]:
        """pi of each row's method, and at how many drafted positions it defers."""
        alpha, chosen = rows.alphas[:, self.level - 1, None, None], rows.methods[:, self.level - 1]
        found: list[Array] = []
        for number, method in enumerate(self.methods):
            pi, delta = method.target(scores, alpha)
            deferred, mine = deferred_drafts(delta, tokens), chosen == number
            if found:
                pi = jnp.where(mine[:, None, None], pi, found[0])
                deferred = jnp.where(mine, deferred, found[1])
            found = [pi, deferred]
        return found[0], found[1]

    def _draft(self, params: Params, caches: Cache, rows: Rows) -> tuple[Block, Cache, Counts]:
        """block_size + 1 tokens with their laws: the last token is never submitted, its law serves
        the bonus position and its pass leaves the drafter's cache complete. A drafter that `spares`
        that pass leaves scratch there."""
        drafter, need = self.drafter, self.block_size + 1

        def one_block(caches: Cache, ends: Any, done: Int[Array, " B"]) -> Any:
            """The drafter's next block, `done` tokens into the draft, after the two tokens `ends`."""
            at = rows._replace(before=ends[0], last=ends[1], start=rows.start + done,
                               room=jnp.where(rows.room > 0, need - done, 0))
            block, caches, counts = drafter.step(params, caches, at, NO_TOKEN)
            return block, caches, last_two(block, *ends), counts

        nothing, ends = jnp.zeros_like(rows.room), (rows.before, rows.last)
        if drafter.width == 1:  # a known number of steps
            def step(carry: Any, n: Int[Array, ""]) -> Any:
                caches, ends = carry
                block, caches, ends, counts = one_block(caches, ends, jnp.where(rows.room > 0, n, 0))
                return (caches, ends), (block, counts)

            if isinstance(drafter, Autoregressive) and self.spares:
                block, caches, counts = drafter.step_behind(params, caches, rows._replace(
                    room=jnp.where(rows.room > 0, need, 0)))
                (caches, _), (blocks, more) = lax.scan(step, (caches, last_two(block, *ends)),
                                                       jnp.arange(1, self.block_size))
                blocks = jax.tree.map(lambda x, rest: jnp.concatenate([x[None], rest, x[None]]),
                                      block, blocks)
                counts = jnp.concatenate([counts[None], more])
            else:
                (caches, _), (blocks, counts) = lax.scan(step, (caches, ends), jnp.arange(need))
            tokens, probs, own, origin, size = blocks
            columns = (jnp.moveaxis(x[:, :, 0], 0, 1) for x in (tokens, probs, own, origin))
            return Block._make((*columns, jnp.sum(size, axis=0))), caches, add_up(counts)

        def advance(carry: Any) -> Any:
            drafted, caches, ends, counts = carry
            block, caches, ends, counted = one_block(caches, ends, drafted.size)
            return append(drafted, block), caches, ends, add(counts, counted)

        (*shapes, _), _, _, counts = jax.eval_shape(one_block, caches, ends, nothing)
        width = need + drafter.width  # a block written at the last offset still fits
        buffers = [jnp.zeros((x.shape[0], width, *x.shape[2:]), x.dtype) for x in shapes]
        counts = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), counts)
        drafted, caches, _, counts = lax.while_loop(
            lambda carry: jnp.any((carry[0].size < need) & (rows.room > 0)), advance,
            (Block._make((*buffers, nothing)), caches, ends, counts))
        return Block._make((*(x[:, :need] for x in drafted[:-1]), drafted.size)), caches, counts


def hierarchy(models: Sequence[LanguageModel], methods: Sequence[Method | tuple[Method, ...]],
              block_sizes: Sequence[int]) -> Sampler:
    """Models from smallest to largest; each but the first verifies what those before it draft.

    methods and block_sizes have one entry for each verifier, from the smallest up. Raises ValueError for
    other numbers of them.
    """
    if not len(models) - 1 == len(methods) == len(block_sizes):
        raise ValueError(f"{len(models)} models need {len(models) - 1} methods and block sizes, "
                         f"got {len(methods)} and {len(block_sizes)}.")
    sampler: Sampler = Autoregressive(models[0])
    for verifier, method, block_size in zip(models[1:], methods, block_sizes, strict=True):
        sampler = Speculative(sampler, verifier, method, block_size)
    return sampler


# Pieces of rounds

def is_greedy(rows: Rows) -> Bool[Array, "B 1 1"]:
    return (rows.options.temperature <= 0)[:, None, None]


def uniforms(rows: Rows, level: int, role: Role, count: int) -> Float[Array, "B count"]:
    """The rows' random numbers for the `count` positions from rows.start on."""
    positions = rows.start[:, None] + jnp.arange(count)
    return jnp.take_along_axis(rows.noise[:, level, role], positions, axis=1, mode="clip")


def written(draft: Draft, verdict: Verdict) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """The round's tokens, the accepted draft and then the next token, and their origins."""
    size = draft.tokens.shape[1]
    column, stop = jnp.arange(size + 1), verdict.num_accepted[:, None]
    tokens = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(column == stop, verdict.next_token[:, None], tokens)
    own = jnp.where(stop == size, Origin.BONUS, Origin.CORRECTION)
    return tokens, jnp.where(column < stop, Origin.DRAFT, own).astype(jnp.int32)


def append(drafted: Block, block: Block) -> Block:
    """`drafted` with `block` written at each row's size."""
    placed = [placed_at(old, new, drafted.size) for old, new in zip(drafted[:-1], block[:-1], strict=True)]
    return Block._make((*placed, drafted.size + block.size))


def placed_at(old: Array, new: Array, start: Int[Array, " B"]) -> Array:
    """old [B, L, ...] with new [B, N, ...] written from each row's `start` on; what is past L is left out."""
    column = jnp.arange(old.shape[1])
    for n in range(new.shape[1]):
        here = (column == (start + n)[:, None]).reshape(*old.shape[:2], *(1,) * (old.ndim - 2))
        old = jnp.where(here, new[:, n:n + 1], old)
    return old


def last_two(block: Block, before: Int[Array, " B"], last: Int[Array, " B"]) -> tuple[Array, Array]:
    """The two tokens each row ends with after `block`, where it ended with `before` and `last`."""
    tokens = jnp.concatenate([jnp.stack([before, last], axis=1), block.tokens], axis=1)
    index = block.size[:, None] + jnp.arange(2)
    before, last = jnp.moveaxis(jnp.take_along_axis(tokens, index, axis=1), 1, 0)
    return before, last


def last_token(block: Block, last: Int[Array, " B"]) -> Int[Array, " B"]:
    """The token each row ends with after `block`: its own last one, `last` for an empty block."""
    return last_two(block, last, last)[1]


def add(a: Counts, b: Counts) -> Counts:
    return jax.tree.map(jnp.add, a, b)


def add_up(counts: Counts) -> Counts:
    """The sum over a leading axis of steps."""
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), counts)


def cut_after(tokens: Int[Array, "B N"], size: Int[Array, " B"], eos_id: int) -> Int[Array, " B"]:
    """`size`, or less: up to and with the first eos_id."""
    is_eos = (tokens == eos_id) & (jnp.arange(tokens.shape[1]) < size[:, None])
    return jnp.where(jnp.any(is_eos, axis=1), jnp.argmax(is_eos, axis=1) + 1, size)


def deferred_drafts(delta: Array | None, tokens: Int[Array, "B G"]) -> Int[Array, " B"]:
    """At how many drafted positions the rule defers (a per-token rule: the drafted token)."""
    if delta is None:
        return jnp.zeros(tokens.shape[0], jnp.int32)
    delta = jnp.broadcast_to(delta, (*tokens.shape[:1], tokens.shape[1] + 1, delta.shape[-1]))[:, :-1]
    if delta.shape[-1] > 1:
        delta = jnp.take_along_axis(delta, tokens[..., None], axis=-1)
    return jnp.sum(delta[..., 0], axis=1, dtype=jnp.int32)
