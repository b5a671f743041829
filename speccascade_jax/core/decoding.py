"""Samplers and the one compiled loop that runs them.

A sampler emits a block of tokens together with the distribution each was drawn from, so any
sampler can draft for a larger model. Between steps every cache, at every level, covers all
committed tokens but the last (a lossless rule's drafter may lack one more, see `spares`); what lies
at or past a cache's `length` is scratch.
"""

import dataclasses
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int, Key

from speccascade_jax.core.metrics import Counters
from speccascade_jax.core.rules import Method, Scores
from speccascade_jax.core.sampling import Role, draw, noise, token_probs
from speccascade_jax.core.typing import Cache, LanguageModel, Params, Prefix, SamplingOptions
from speccascade_jax.core.verification import Draft, verify

Array = jax.Array
Alphas = Float[Array, " K"]
NO_TOKEN = -1  # an end-of-sequence id that no token has


class Origin(IntEnum):
    """Who wrote a token."""

    DRAFT = 0       # drafted and accepted
    CORRECTION = 1  # drawn from the residual at a rejection
    BONUS = 2       # drawn from the target after a wholly accepted draft
    MODEL = 3       # a single model, decoding autoregressively


class Rows(NamedTuple):
    """Where each row stands when a sampler is asked for its next block."""

    noise: Float[Array, "B levels 2 L"]  # see sampling.noise
    before: Int[Array, " B"]  # the last committed token but one, where there are two
    last: Int[Array, " B"]    # the last committed token
    start: Int[Array, " B"]   # the position of the next one
    room: Int[Array, " B"]    # how many tokens it may take; 0: the row rests


class Block(NamedTuple):
    """Up to N tokens a row; those from `size` on are scratch."""

    tokens: Int[Array, "B N"]
    probs: Float[Array, "B N V"]  # the law each token was drawn from
    own: Float[Array, "B N V"]    # the same law built from untransformed distributions
    origin: Int[Array, "B N"]
    size: Int[Array, " B"]         # 0 .. min(N, room)


@runtime_checkable
class Sampler(Protocol):
    """Static and hashable. `params` and `caches` nest as the sampler does."""

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

    def init(self, params: Params, inputs: Int[Array, "B S"], input_length: Int[Array, " B"],
             max_length: int) -> tuple[Prefix, Cache]: ...

    def step(self, params: Params, caches: Cache, rows: Rows, options: SamplingOptions, alphas: Alphas,
             eos_id: int) -> tuple[Block, Cache, Any]:
        """One block, cut after the first eos_id; the caches; what was counted.

        On return the caches cover start + size - 1 positions.
        """
        ...

    def roll_back(self, caches: Cache, length: Int[Array, " B"]) -> Cache:
        """Caches that cover `length` positions, or what they cover now if that is less."""
        ...


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """One model, one token a step. Counts its passes, [B]."""

    model: LanguageModel
    width: int = dataclasses.field(default=1, init=False)
    level: int = dataclasses.field(default=0, init=False)
    overhang: int = dataclasses.field(default=0, init=False)

    def init(self, params, inputs, input_length, max_length):
        return self.model.prefill(params, inputs, input_length, max_length)

    def step(self, params, caches, rows, options, alphas, eos_id):
        return self._drawn(*self.model.extend(params, rows.last[:, None], caches), rows, options)

    def step_behind(self, params: Params, caches: Cache, rows: Rows, options: SamplingOptions
                    ) -> tuple[Block, Cache, Any]:
        """step() for caches that may also lack the last token but one, which is then read first."""
        lacks = jnp.clip(rows.start - 1 - caches.length, 0, 1)  # a row that rests may lack more
        tokens = jnp.stack([jnp.where(lacks > 0, rows.before, rows.last), rows.last], axis=1)
        logits, caches = self.model.extend(params, tokens, caches)
        logits = jnp.take_along_axis(logits, lacks[:, None, None], axis=1)
        return self._drawn(logits, caches, rows, options)

    def _drawn(self, logits: Float[Array, "B 1 V"], caches: Cache, rows: Rows, options: SamplingOptions
               ) -> tuple[Block, Cache, Any]:
        probs = token_probs(logits, options)
        token = draw(uniforms(rows, self.level, Role.DRAW, 1)[:, 0], probs[:, 0])
        size = jnp.minimum(rows.room, 1)
        block = Block(token[:, None], probs, jax.nn.softmax(logits, axis=-1),
                      jnp.full_like(token, Origin.MODEL)[:, None], size)
        return block, self.roll_back(caches, rows.start - 1 + size), size

    def roll_back(self, caches, length):
        return caches._replace(length=jnp.minimum(caches.length, length))


@dataclasses.dataclass(frozen=True)
class Speculative:
    """GenSpecSample (Narasimhan et al., Algorithm 4): `drafter` writes, `verifier` scores.

    The output follows method.target of the drafter's and the verifier's distributions. Counts
    (the drafter's counts, its own Counters).
    """

    drafter: Sampler
    verifier: LanguageModel
    method: Method
    block_size: int

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
        """Whether the drafter does not read its last token: pi needs no q at the bonus position, and where
        that token is kept, the next draft begins with reading it."""
        return self.method.lossless and isinstance(self.drafter, Autoregressive)

    def init(self, params, inputs, input_length, max_length):
        prefix, drafter_caches = self.drafter.init(params[0], inputs, input_length, max_length)
        _, verifier_cache = self.verifier.prefill(params[1], inputs, input_length, max_length)
        return prefix, (drafter_caches, verifier_cache)

    def step(self, params, caches, rows, options, alphas, eos_id):
        size = self.block_size
        drafted, drafter_caches, drafter_counts = self._draft(
            params[0], caches[0], rows, options, alphas[:-1])
        draft = Draft(drafted.tokens[:, :size], drafted.probs)

        logits, verifier_cache = self.verifier.extend(
            params[1], jnp.concatenate([rows.last[:, None], draft.tokens], axis=1), caches[1])
        scores = Scores(drafted.own, jax.nn.softmax(logits, axis=-1), draft.probs,
                        token_probs(logits, options), jnp.asarray(options.temperature) <= 0)

        pi, delta = self.method.target(scores, alphas[-1])
        own_pi, _ = self.method.target(
            scores._replace(q_sampled=scores.q, p_sampled=scores.p), alphas[-1])

        verdict = verify(uniforms(rows, self.level, Role.ACCEPT, size),
                         uniforms(rows, self.level, Role.DRAW, size + 1), draft, pi)

        column = jnp.arange(size + 1)
        stop = verdict.num_accepted[:, None]
        tokens = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
        tokens = jnp.where(column == stop, verdict.next_token[:, None], tokens)
        own = jnp.where(stop == size, Origin.BONUS, Origin.CORRECTION)
        origin = jnp.where(column < stop, Origin.DRAFT, own).astype(jnp.int32)
        emitted = jnp.minimum(cut_after(tokens, verdict.num_accepted + 1, eos_id), rows.room)

        caches = self.roll_back((drafter_caches, verifier_cache), rows.start - 1 + emitted)
        accepted = jnp.minimum(verdict.num_accepted, emitted)
        counts = Counters.of_round(rows.room > 0, size, accepted, emitted,
                                   deferred_drafts(delta, draft.tokens))
        return Block(tokens, pi, own_pi, origin, emitted), caches, (drafter_counts, counts)

    def roll_back(self, caches, length):
        return self.drafter.roll_back(caches[0], length), caches[1]._replace(length=length)

    def _draft(self, params, caches, rows, options, alphas):
        """block_size + 1 tokens with their laws: the last token is never submitted, its law serves
        the bonus position and its pass leaves the drafter's cache complete. A drafter that `spares`
        that pass leaves scratch there."""
        drafter, need = self.drafter, self.block_size + 1

        def one_block(caches, ends, done):
            """The drafter's next block, `done` [B] tokens into the draft, after the two tokens `ends`."""
            at = Rows(rows.noise, *ends, rows.start + done, jnp.where(rows.room > 0, need - done, 0))
            block, caches, counts = drafter.step(params, caches, at, options, alphas, NO_TOKEN)
            return block, caches, last_two(block, *ends), counts

        nothing, ends = jnp.zeros_like(rows.room), (rows.before, rows.last)
        if drafter.width == 1:  # a known number of steps
            def step(carry, n):
                block, *carry, counts = one_block(*carry, jnp.where(rows.room > 0, n, 0))
                return tuple(carry), (block, counts)

            if self.spares:
                block, caches, counts = drafter.step_behind(params, caches, rows._replace(
                    room=jnp.where(rows.room > 0, need, 0)), options)
                (caches, _), (blocks, more) = lax.scan(step, (caches, last_two(block, *ends)),
                                                       jnp.arange(1, self.block_size))
                blocks = jax.tree.map(lambda x, rest: jnp.concatenate([x[None], rest, x[None]]),
                                      block, blocks)
                counts = jnp.concatenate([counts[None], more])
            else:
                (caches, _), (blocks, counts) = lax.scan(step, (caches, ends), jnp.arange(need))
            tokens, probs, own, origin, size = blocks
            drafted = [jnp.moveaxis(x[:, :, 0], 0, 1) for x in (tokens, probs, own, origin)]
            return Block(*drafted, jnp.sum(size, axis=0)), caches, add_up(counts)

        def advance(carry):
            drafted, caches, ends, counts = carry
            block, caches, ends, counted = one_block(caches, ends, drafted.size)
            return append(drafted, block), caches, ends, add(counts, counted)

        (*shapes, _), _, _, counts = jax.eval_shape(one_block, caches, ends, nothing)
        width = need + drafter.width  # a block written at the last offset still fits
        buffers = [jnp.zeros((x.shape[0], width, *x.shape[2:]), x.dtype) for x in shapes]
        counts = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), counts)
        drafted, caches, _, counts = lax.while_loop(
            lambda carry: jnp.any((carry[0].size < need) & (rows.room > 0)), advance,
            (Block(*buffers, nothing), caches, ends, counts))
        *buffers, size = drafted
        return Block(*(x[:, :need] for x in buffers), size), caches, counts


def hierarchy(models: Sequence[LanguageModel], methods: Sequence[Method], block_sizes: Sequence[int]
              ) -> Sampler:
    """Models from smallest to largest; each but the first verifies what those before it draft.

    methods and block_sizes have one entry for each verifier, from the smallest up.
    """
    if not len(models) - 1 == len(methods) == len(block_sizes):
        raise ValueError(f"{len(models)} models need {len(models) - 1} methods and block sizes, "
                         f"got {len(methods)} and {len(block_sizes)}.")
    sampler: Sampler = Autoregressive(models[0])
    for verifier, method, block_size in zip(models[1:], methods, block_sizes, strict=True):
        sampler = Speculative(sampler, verifier, method, block_size)
    return sampler


def uniforms(rows: Rows, level: int, role: Role, count: int) -> Float[Array, "B count"]:
    """The rows' random numbers for the `count` positions from rows.start on."""
    positions = rows.start[:, None] + jnp.arange(count)
    return jnp.take_along_axis(rows.noise[:, level, role], positions, axis=1, mode="clip")


def append(drafted: Block, block: Block) -> Block:
    """`drafted` with `block` written at each row's size."""
    column = jnp.arange(drafted.tokens.shape[1])

    def placed(old: Array, new: Array) -> Array:
        for n in range(new.shape[1]):
            here = (column == (drafted.size + n)[:, None]).reshape(*old.shape[:2], *(1,) * (old.ndim - 2))
            old = jnp.where(here, new[:, n:n + 1], old)
        return old

    return Block(placed(drafted.tokens, block.tokens), placed(drafted.probs, block.probs),
                 placed(drafted.own, block.own), placed(drafted.origin, block.origin),
                 drafted.size + block.size)


def last_two(block: Block, before: Array, last: Array) -> tuple[Array, Array]:
    """The two tokens each row ends with after `block`, where it ended with `before` and `last`."""
    tokens = jnp.concatenate([jnp.stack([before, last], axis=1), block.tokens], axis=1)
    index = block.size[:, None] + jnp.arange(2)
    before, last = jnp.moveaxis(jnp.take_along_axis(tokens, index, axis=1), 1, 0)
    return before, last


def last_token(block: Block, last: Array) -> Array:
    """The token each row ends with after `block`: its own last one, `last` for an empty block."""
    return last_two(block, last, last)[1]


def add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def add_up(counts: Any) -> Any:
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
    delta = delta[:, :-1]
    if delta.shape[-1] > 1:
        delta = jnp.take_along_axis(delta, tokens[..., None], axis=-1)
    return jnp.sum(delta[..., 0], axis=1, dtype=jnp.int32)


class State(NamedTuple):
    """What the decoding loop carries."""

    tokens: Int[Array, "B N"]  # emitted tokens; scratch from `emitted` on
    origin: Int[Array, "B N"]
    emitted: Int[Array, " B"]
    rows: Rows
    caches: Cache
    counts: Any


class Generation(NamedTuple):
    """tokens and origin are -1 from `length` on; the end-of-sequence token is counted in."""

    tokens: Int[Array, "B N"]
    origin: Int[Array, "B N"]
    length: Int[Array, " B"]
    counts: Any


def begin(sampler: Sampler, params: Params, keys: Key[Array, " B"], inputs: Int[Array, "B S"],
          input_length: Int[Array, " B"], *, max_new_tokens: int) -> State:
    """Prefills every model; rows with input_length 0 rest from the start and stay empty."""
    widest = inputs.shape[1] + 1  # no prefix is longer
    prompt = jax.eval_shape(lambda: sampler.init(params, inputs, input_length, widest)[0]).tokens.shape[1]
    length = prompt + max_new_tokens + sampler.overhang
    prefix, caches = sampler.init(params, inputs, input_length, length)
    last = jnp.take_along_axis(prefix.tokens, prefix.length[:, None] - 1, axis=1)[:, 0]
    room = jnp.where(input_length > 0, max_new_tokens, 0).astype(jnp.int32)
    blank = jnp.zeros((inputs.shape[0], max_new_tokens + sampler.width), jnp.int32)
    rows = Rows(noise(keys, sampler.level + 1, length), last, last, prefix.length, room)
    counts = jax.eval_shape(lambda: sampler.step(params, caches, rows, SamplingOptions(),
                                                 jnp.zeros(sampler.level), NO_TOKEN)[2])
    counts = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), counts)
    return State(blank, blank, jnp.zeros_like(room), rows, caches, counts)


def advance(sampler: Sampler, params: Params, state: State, options: SamplingOptions, alphas: Alphas,
            *, eos_id: int) -> State:
    """One round: every unfinished row commits one block."""
    block, caches, counted = sampler.step(params, state.caches, state.rows, options, alphas, eos_id)
    column = jnp.arange(state.tokens.shape[1])[None]
    tokens, origin = state.tokens, state.origin
    for n in range(sampler.width):
        here = column == (state.emitted + n)[:, None]
        tokens = jnp.where(here, block.tokens[:, n:n + 1], tokens)
        origin = jnp.where(here, block.origin[:, n:n + 1], origin)
    before, last = last_two(block, state.rows.before, state.rows.last)
    finished = (block.size > 0) & (last == eos_id)
    rows = Rows(state.rows.noise, before, last, state.rows.start + block.size,
                jnp.where(finished, 0, state.rows.room - block.size))
    return State(tokens, origin, state.emitted + block.size, rows, caches, add(state.counts, counted))


def run(sampler: Sampler, params: Params, state: State, options: SamplingOptions, alphas: Alphas,
        resting: int | Array, *, eos_id: int) -> State:
    """Rounds until at least `resting` rows rest."""
    busy = state.rows.room.shape[0] - resting
    return lax.while_loop(lambda state: jnp.sum(state.rows.room > 0) > busy,
                          lambda state: advance(sampler, params, state, options, alphas, eos_id=eos_id),
                          state)


def refill(state: State, fresh: State, slots: Int[Array, " R"], narrow: bool = False) -> State:
    """`state` with its rows `slots` replaced by those of `fresh`, R < B; a slot past the last is left out.

    The two may have begun with inputs of different widths: the result is as wide as `state`, or with
    `narrow` as `fresh`, which must hold all rows that do not rest. Arrays of one shape in both hold
    nothing of rows and stay; a single row's may lack the axis of rows.
    """
    def replaced(old: Array, new: Array) -> Array:
        if old.shape == new.shape:
            return old
        new = new.reshape(-1, *new.shape[new.ndim - old.ndim + 1:])
        widths = (new if narrow else old).shape[1:]
        old = old[:, *map(slice, widths)]
        new = new[:, *map(slice, widths)]
        missing = [(0, wide - own) for wide, own in zip(widths, new.shape[1:], strict=True)]
        return old.at[slots].set(jnp.pad(new, [(0, 0), *missing]), mode="drop")

    return jax.tree.map(replaced, state, fresh)


def finish(state: State, max_new_tokens: int) -> Generation:
    past = jnp.arange(max_new_tokens) >= state.emitted[:, None]
    return Generation(jnp.where(past, -1, state.tokens[:, :max_new_tokens]),
                      jnp.where(past, -1, state.origin[:, :max_new_tokens]), state.emitted, state.counts)


@partial(jax.jit, static_argnames=("sampler", "max_new_tokens", "eos_id"))
def generate(sampler: Sampler, params: Params, keys: Key[Array, " B"], inputs: Int[Array, "B S"],
             input_length: Int[Array, " B"], options: SamplingOptions, alphas: Alphas, *,
             max_new_tokens: int, eos_id: int) -> Generation:
    """Decodes every row until eos_id or max_new_tokens, in one lax.while_loop.

    params nests as the sampler: a model's own for Autoregressive, (drafter's, verifier's) for
    Speculative. alphas [K] holds the lenience of each verifier, from the smallest up (K = 0 for
    Autoregressive). Sweeping keys, options' traced fields and alphas does not compile again.
    """
    state = begin(sampler, params, keys, inputs, input_length, max_new_tokens=max_new_tokens)
    state = run(sampler, params, state, options, alphas, inputs.shape[0], eos_id=eos_id)
    return finish(state, max_new_tokens)
