"""Speculative cascades: a sampler drafts and a model verifies; a hierarchy is a fold of such steps."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from speccascade_jax.core.counters import Counters
from speccascade_jax.core.methods import Method
from speccascade_jax.core.nests import covered, network_of, roll_back, top
from speccascade_jax.core.protocols import (
    NO_LIMIT,
    Block,
    Cache,
    Counts,
    LanguageModel,
    Laws,
    Params,
    Rows,
    Sampler,
    ability_of,
    laws,
    states_law,
)
from speccascade_jax.core.randomness import Role
from speccascade_jax.core.rounds import (
    add,
    after,
    append,
    cut_after,
    is_greedy,
    noise_sizes_of,
    read,
    step,
    uniforms,
    written,
)
from speccascade_jax.core.rules import Scores
from speccascade_jax.core.samplers.block import drafting
from speccascade_jax.core.spans import lenience
from speccascade_jax.core.transforms import token_probs
from speccascade_jax.core.verification import TOKEN, Draft, Verification, deferred_drafts, verify

Array = jax.Array
HandOver = Literal["need", "truncate", "keep"]


def can_lag(sampler: Sampler) -> bool:
    """Whether the caches of a sampler, and of all that draft below it, may lack committed tokens."""
    below: Sampler | None = getattr(sampler, "drafter", None)
    return ability_of(sampler, "behind") is not None and (below is None or can_lag(below))


@dataclasses.dataclass(frozen=True)
class Speculative:
    """GenSpecSample (Narasimhan et al., Algorithm 4): `drafter` writes, `verifier` scores.

    The output follows method.target of the drafter's and the verifier's distributions. With several methods,
    rows.methods selects one per row; with several ways to verify, rows.verifications does. Counts (the
    drafter's counts, its own Counters).

    A drafter that itself verifies writes blocks of varying length until `block_size` tokens are accepted
    (Mohri et al., arXiv 2510.19705). `hand_over` decides on surplus tokens: "need" drafts no more than
    requested, "truncate" drops the surplus, "keep" passes it on (but not to a rule, whose draft must not end
    depending on its tokens).
    """

    drafter: Sampler
    verifier: LanguageModel
    method: Method | tuple[Method, ...]
    block_size: int
    hand_over: HandOver = "need"
    verification: Verification | tuple[Verification, ...] = TOKEN
    behind: int = 0  # as Autoregressive's
    counted: int = 0
    """The largest number of drafts per round that the histogram can record, if greater than `capacity`."""
    by_prefix: ClassVar[bool] = True  # a rule by prefix has a law by prefix here
    sized: ClassVar[bool] = True  # drafts as many tokens as it is told to

    @property
    def shares(self) -> bool:
        """Whether the verifier and the drafter's largest model belong to the same network."""
        return self._is_in(self.drafter.models)

    def _is_in(self, models: Any) -> bool:
        """Whether the largest of the drafter's `models` belongs to the verifier's network."""
        network = network_of(self.verifier)
        return network is not self.verifier and network == top(models, models)

    @property
    def models(self) -> Any:
        models = self.drafter.models
        return models if self._is_in(models) else (models, network_of(self.verifier))

    @property
    def methods(self) -> tuple[Method, ...]:
        return self.method if isinstance(self.method, tuple) else (self.method,)

    @property
    def verifications(self) -> tuple[Verification, ...]:
        return self.verification if isinstance(self.verification, tuple) else (self.verification,)

    @property
    def by_round(self) -> bool:
        """Whether random numbers belong to rounds in some rows; see randomness.noise."""
        return any(way.by_round for way in self.verifications)

    @property
    def noise_sizes(self) -> tuple[tuple[int, ...], ...]:
        size = (self.width,) if self.by_round else ()
        return (*((*size, *sizes) for sizes in noise_sizes_of(self.drafter)), size)

    def plain(self, counts: Counts) -> dict[str, Any]:
        """Its own counts and the passes of the smallest model. If the drafter is a hierarchy, `below` has the
        counts of each model below the verifier, the smallest first."""
        lower, numbers = self.drafter.plain(counts[0]), counts[1].plain()
        if "model_passes" in lower:  # nothing drafts for the drafter
            return {"drafter_passes": lower["model_passes"], **numbers}
        passes = lower.pop("drafter_passes")
        smaller = lower.pop("below", [{"passes": passes}])
        return {"drafter_passes": passes, **numbers, "below": [*smaller, lower]}

    @property
    def _at_once(self) -> bool:
        """Whether the drafter writes a whole draft in one step; see core.samplers.block."""
        return ability_of(self.drafter, "at_once")

    @property
    def capacity(self) -> int:
        """The largest number of tokens that it drafts."""
        has_surplus = self.hand_over == "keep" and not self._at_once
        return self.block_size + (self.drafter.width - 1 if has_surplus else 0)

    @property
    def width(self) -> int:
        return self.capacity + 1

    @property
    def resizes(self) -> bool:
        """Whether of_blocks() is supported: a single model drafts token by token, any number of tokens."""
        return self.sized and ability_of(self.drafter, "catches_up")

    def of_blocks(self, size: int) -> "Speculative":
        """The sampler whose rounds draft up to `size` <= block_size tokens, and whose states are this one's.

        With `size` 0 a lossless row is decoded by its verifier alone: nothing is drafted, and the drafter's
        cache falls behind. caught_up() must be called before the next round with drafting. A row with another
        method still asks its drafter for the law of the token.
        """
        return dataclasses.replace(self, block_size=size, counted=self.capacity)

    def caught_up(
        self, params: Params, caches: Cache, tokens: Int[Array, "B N"], first: Int[Array, " B"], end: Any
    ) -> Cache:
        """The caches once the drafter has read the missing committed tokens, except the last one, `width`
        tokens at a time. `tokens` are those from position `first` on, and `end` [B] is the number of
        positions covered afterwards."""
        drafter: Any = self.drafter
        model, held, weights = drafter.model, self.below(caches), self.below(params)

        def lacks(cache: Cache) -> Array:
            return jnp.any(covered(model, cache) < end)

        def read_on(cache: Cache) -> Cache:
            place = (covered(model, cache) - first)[:, None] + jnp.arange(self.width)
            chunk = jnp.take_along_axis(tokens, place, axis=1, mode="clip")
            # What a row reads past its end is forgotten; no row loses what it has read before that.
            return roll_back(drafter.models, model.extend(weights, chunk, cache)[1], end)

        held = lax.while_loop(lacks, read_on, held)
        return held if self.shares else (held, caches[1])

    @property
    def level(self) -> int:
        return self.drafter.level + 1

    @property
    def overhang(self) -> int:
        return self.capacity + 1 + self.behind + self.reader.overhang

    @property
    def spares(self) -> bool:
        """Whether the bonus pass is spared: a lossless pi needs no q at the bonus position, so in rows of
        such methods the drafter does not read its last token; if that token is accepted, the next draft
        begins by reading it."""
        return any(method.lossless for method in self.methods) and can_lag(self.drafter)

    @property
    def reader(self) -> Sampler:
        """The drafter, for caches that may lack what it has not read: a bonus here, what its own caches lack,
        and with "need" up to as many tokens that were needed one by one, and so written without a draft."""
        drafter = self.drafter
        needs = self.hand_over == "need"
        deep = drafter.level > 0 and can_lag(drafter)
        lacks = self.behind  # the verifier's cache, which is that of a drafter that writes at once
        if not self._at_once:
            lacks = self.behind * (1 + (needs and self.spares)) + (self.spares or (needs and deep))
        return dataclasses.replace(drafter, behind=lacks) if lacks else drafter  # type: ignore

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        drafted = self._draft(self.below(params), self.below(caches), rows, eos_id)
        return self.verified(params, caches, rows, eos_id, *drafted)

    def below(self, nest: Any) -> Any:
        """The drafter's part of parameters or caches."""
        return nest if self.shares else nest[0]

    @property
    def draft_laws(self) -> Callable[..., Laws] | None:
        """None if the drafter states no law."""
        return self._draft_laws if ability_of(self.drafter, "laws") is not None else None

    def _draft_laws(self, params: Params, caches: Cache, rows: Rows, tokens: Int[Array, "B N"]) -> Laws:
        return laws(self.drafter, self.below(params), self.below(caches), rows, tokens)

    @property
    def laws(self) -> Callable[..., Laws] | None:
        """None if no method has a law by prefix. In rows of a method that has none, where states_law() says
        so, the distributions mean nothing."""
        stated = any(method.lossless for method in self.methods) or self._law_of_drafts is not None
        return self._laws if stated else None

    @property
    def _law_of_drafts(self) -> Callable[..., Laws] | None:
        """draft_laws, if some method's law by prefix is made of them."""
        return self.draft_laws if any(self._follows_drafts(method) for method in self.methods) else None

    def _follows_drafts(self, method: Method) -> bool:
        """Whether a method's law is made of the drafter's, too, and is one by prefix if that is."""
        reads_states = not getattr(network_of(self.verifier), "by_prefix", True) and self.shares
        return self.by_prefix and not reads_states and method.by_prefix and not method.lossless

    def _laws(self, params: Params, caches: Cache, rows: Rows, tokens: Int[Array, "B N"]) -> Laws:
        cache = top(self.drafter.models, caches) if self.shares else caches[1]
        logits, _ = self.verifier.extend(top(self.models, params), tokens, cache)
        p, p_sampled = jax.nn.softmax(logits, axis=-1), token_probs(logits, rows.options)
        draft_laws = self._law_of_drafts
        # Whatever stands for the drafts' laws, a lossless method's is p.
        q, q_sampled = (p, p_sampled) if draft_laws is None else draft_laws(params, caches, rows, tokens)
        scores = Scores(q, p, q_sampled, p_sampled, is_greedy(rows))
        draft = Draft(tokens[:, 1:], q_sampled, jnp.full_like(rows.room, tokens.shape[1] - 1))
        untransformed, _ = self.target(scores._replace(q_sampled=scores.q, p_sampled=scores.p), rows, draft)
        return untransformed, self.target(scores, rows, draft)[0]

    def states_law(self, methods: Sequence[Method]) -> bool:
        """A lossless method's law is its verifier's. Another's is also made of the drafter's, which must be a
        law by prefix: that of a drafter that reads its verifier's states, or proposes tokens without a law,
        depends on where the rounds began.
        """
        here = [method for method in tuple(methods[-1:]) or self.methods if not method.lossless]
        return not here or (all(map(self._follows_drafts, here)) and states_law(self.drafter, methods[:-1]))

    def verified(
        self,
        params: Params,
        caches: Cache,
        rows: Rows,
        eos_id: int,
        drafted: Block,
        below: Cache,
        drafter_counts: Counts,
    ) -> tuple[Block, Cache, Counts]:
        """The rest of step(), after what _draft() has returned."""
        size, count = drafted.tokens.shape[1] - 1, drafted.size
        draft = Draft(drafted.tokens[:, :size], drafted.probs, count)
        draft = draft._replace(tokens=jnp.where(draft.inside, draft.tokens, 0))  # the rest may be no tokens

        cache = top(self.drafter.models, below) if self.shares else caches[1]
        logits, cache = read(self.verifier, top(self.models, params), cache, rows, self.behind, draft.tokens)
        scores = Scores(
            drafted.untransformed,
            jax.nn.softmax(logits, axis=-1),
            draft.probs,
            token_probs(logits, rows.options),
            is_greedy(rows),
        )

        pi, deferred = self.target(scores, rows, draft)
        untransformed, _ = self.target(scores._replace(q_sampled=scores.q, p_sampled=scores.p), rows, draft)

        verdict = verify(
            uniforms(rows, self.level, Role.ACCEPT, size, self.by_round),
            uniforms(rows, self.level, Role.DRAW, size + 1, self.by_round),
            draft,
            pi,
            self.verifications,
            rows.verifications,
        )
        tokens, origin = written(draft, drafted.origin, verdict, self.level)
        emitted = jnp.minimum(cut_after(tokens, verdict.num_accepted + 1, eos_id), rows.room)

        below = below if not self.shares else below[0] if type(self.models) is tuple else None
        caches = cache if below is None else (below, cache)
        caches = roll_back(self.models, caches, rows.start - 1 + emitted)
        accepted = jnp.minimum(verdict.num_accepted, emitted)
        places = max(self.capacity, self.counted)
        counts = Counters.of_round(rows.room > 0, count, accepted, emitted, deferred, places)
        return Block(tokens, pi, untransformed, origin, emitted), caches, (drafter_counts, counts)

    def target(
        self, scores: Scores, rows: Rows, draft: Draft
    ) -> tuple[Float[Array, "B N V"], Int[Array, " B"]]:
        """pi of each row's method, and the number of drafted positions at which it defers."""
        alpha, chosen = lenience(rows, self.level, draft.tokens), rows.methods[:, self.level - 1]
        result: list[Array] = []
        for number, method in enumerate(self.methods):
            pi, delta = method.target(scores, alpha)
            deferred, mine = deferred_drafts(delta, draft), chosen == number
            if result:
                pi = jnp.where(mine[:, None, None], pi, result[0])
                deferred = jnp.where(mine, deferred, result[1])
            result = [pi, deferred]
        return result[0], result[1]

    def _draft(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        """The draft with its laws, its size in each row, and one more token that is never submitted: its law
        serves the bonus position, and reading its place leaves the drafter's cache complete. Where that
        pass is spared, the last place is scratch."""
        return self._draft_unless(None, params, caches, rows, eos_id)

    def _draft_unless(
        self, ends: Bool[Array, ""] | None, params: Params, caches: Cache, rows: Rows, eos_id: int
    ) -> tuple[Block, Cache, Counts]:
        """_draft(), or if `ends`, only a draft's first token, with scratch after it."""
        rows = rows._replace(noise=rows.noise.within(self.level, rows.start))
        drafter, lossless = self.reader, [method.lossless and self.spares for method in self.methods]
        extra = jnp.where(jnp.array(lossless)[rows.methods[:, self.level - 1]], 0, 1)
        want = None if rows.want is None else jnp.minimum(self.block_size + 1, rows.want)
        limit = self.block_size if want is None else want - 1
        need = jnp.where(rows.room > 0, limit + extra, 0)
        need = need if ends is None else jnp.where(ends, jnp.minimum(need, 1), need)

        def one_block(drafter: Sampler, done: Any, caches: Any, recent: Any, ended: Any = False) -> Any:
            """The drafter's next block, `done` tokens into the draft, which ends with `recent`."""
            left = jnp.where(ended, 0, jnp.maximum(need - done, 0))
            at = rows._replace(recent=recent, start=rows.start + done, want=None, room=left)
            if self.hand_over == "keep":
                at = at._replace(room=jnp.where((left > 0) & (extra == 0), NO_LIMIT, left))
            elif self.hand_over == "need" and drafter.width > 1:
                at = at._replace(want=left)
            block, caches, counts = step(drafter, params, caches, at, eos_id)
            return block, caches, after(block, recent), counts

        if self._at_once:
            at = rows._replace(want=want, room=need)
            block, caches, passes = step(drafter, params, caches, at, eos_id)
            return block._replace(size=jnp.minimum(block.size, limit)), caches, passes

        if drafter.width == 1 and rows.want is None and self.block_size:  # as many steps in every row

            def another(n: Int[Array, ""], carry: Any) -> Any:
                blocks, caches, recent, passes = carry
                block, caches, recent, counts = one_block(self.drafter, jnp.minimum(n, need), caches, recent)
                blocks = [
                    lax.dynamic_update_index_in_dim(x, new, n, 0)
                    for x, new in zip(blocks, block[:-1], strict=True)
                ]
                return blocks, caches, recent, add(passes, counts)

            first, *begun, passes = one_block(drafter, jnp.zeros_like(need), caches, rows.recent)
            blocks = [jnp.broadcast_to(x, (self.width, *x.shape)) for x in first[:-1]]
            steps = self.block_size + (not all(lossless))
            end = steps if ends is None else jnp.where(ends, 1, steps)
            blocks, caches, _, passes = lax.fori_loop(1, end, another, (blocks, *begun, passes))
            fields = (jnp.moveaxis(x[:, :, 0], 0, 1) for x in blocks)
            size = jnp.where(rows.room > 0, self.block_size, 0)
            return Block._make((*fields, size)), caches, passes

        def busy(carry: Any) -> Array:
            return (carry[0].size < need) & ~carry[3]

        def advance(carry: Any, drafter: Sampler = self.drafter) -> Any:
            drafted, caches, recent, ended, counts = carry
            block, caches, recent, counted = one_block(drafter, drafted.size, caches, recent, ended)
            ended |= (block.size > 0) & (recent[:, -1] == eos_id)
            return append(drafted, block), caches, recent, ended, add(counts, counted)

        columns = jnp.zeros((len(need), self.width), jnp.int32)
        laws = jnp.zeros((*columns.shape, self.verifier.vocab_size))
        counts = jax.eval_shape(partial(one_block, drafter), need, caches, rows.recent)[-1]
        carry = (
            Block(columns, laws, laws, columns, jnp.zeros_like(need)),
            caches,
            rows.recent,
            jnp.zeros_like(need, bool),
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), counts),
        )
        if drafter != self.drafter:  # only the first block reads what the caches lack
            carry = lax.cond(jnp.any(busy(carry)), partial(advance, drafter=drafter), lambda x: x, carry)
        drafted, caches, *_, counts = lax.while_loop(lambda x: jnp.any(busy(x)), advance, carry)
        size = jnp.where(extra > 0, jnp.minimum(drafted.size, limit), drafted.size)
        return drafted._replace(size=size), caches, counts


def hierarchy(
    models: Sequence[LanguageModel],
    methods: Sequence[Method | tuple[Method, ...]],
    block_sizes: Sequence[int],
    hand_over: HandOver = "need",
    verification: Verification | tuple[Verification, ...] = TOKEN,
) -> Sampler:
    """A sampler of models from smallest to largest, in which each except the first verifies the drafts of
    those before it.

    methods and block_sizes have one entry per verifier, smallest first. hand_over: see Speculative. Raises
    ValueError if their number does not match.
    """
    if not len(models) - 1 == len(methods) == len(block_sizes):
        raise ValueError(
            f"{len(models)} models need {len(models) - 1} methods and block sizes, "
            f"got {len(methods)} and {len(block_sizes)}."
        )
    sampler = drafting(models[0], block_sizes[0] if block_sizes else 0)
    for verifier, method, block_size in zip(models[1:], methods, block_sizes, strict=True):
        sampler = Speculative(sampler, verifier, method, block_size, hand_over, verification)
    return sampler
