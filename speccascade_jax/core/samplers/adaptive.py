"""Blocks whose length each row decides: drafting stops when further tokens would probably be rejected."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float

from speccascade_jax.core.nests import fitted
from speccascade_jax.core.protocols import Block, Cache, Counts, Params, Rows, Sampler
from speccascade_jax.core.rounds import after, step
from speccascade_jax.core.samplers.speculative import Speculative

Array = jax.Array
STOP_BELOW = 0.25
ACCEPTANCE = 0.8  # assumed for a row without tested tokens
PRIOR = 32.0  # tested tokens by which that and the drafter's own confidence are believed before a row has any
PARTS = 3  # widths in which drafts are verified; more are slower where other programs run in between


@partial(jax.tree_util.register_dataclass, data_fields=["passes", "tested", "kept", "hoped"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Experience:
    """Statistics of each row's drafter, [B].

    They cover tested tokens only, up to and including a rejection. Later drafts meet the random numbers that
    the next block is drawn with, which no decision may depend on.
    """

    passes: Any
    tested: Any
    kept: Any
    hoped: Any  # the sum of confidence() at the tested positions: what would be kept were it right

    @property
    def bias(self) -> Float[Array, " B"]:
        """The share of accepted tokens minus the drafter's mean confidence, shrunk towards 0."""
        return (self.kept - self.hoped) / (self.tested + PRIOR)

    @property
    def acceptance(self) -> Float[Array, " B"]:
        return (self.kept + PRIOR * ACCEPTANCE) / (self.tested + PRIOR)


def confidence(law: Float[Array, "B V"]) -> Float[Array, " B"]:
    """The probability of the most likely token, given that it is one of the two most likely ones: 1/2 if both
    are equally likely. It is a better estimate of acceptance than the token's own probability when the
    remaining mass is spread over many similar tokens: what matters is whether the verifier prefers another
    one."""
    highest = jnp.max(law, axis=-1)
    below = jnp.max(jnp.where(law < highest[:, None], law, 0.0), axis=-1)
    tied = jnp.sum(law == highest[:, None], axis=-1) > 1
    return highest / (highest + jnp.where(tied, highest, below))


@dataclasses.dataclass(frozen=True)
class Narrowed(Speculative):
    """Speculative for drafts that may be short: they are verified in the narrowest of three widths that holds
    every row's draft, or of four, if a width without drafts pays off."""

    sized: ClassVar[bool] = False

    @property
    def narrowest(self) -> int:
        """The first width, in parts of a block."""
        return 1

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
        """Like Speculative.verified(). A method that reads its position in the round must not see the draft's
        length, so it has only one width."""
        whole, verified = self.block_size, super().verified
        parts = (
            range(self.narrowest, PARTS + 1) if all(method.by_prefix for method in self.methods) else [PARTS]
        )
        widths = sorted({-(-whole * part // PARTS) for part in parts})

        chosen = jnp.searchsorted(jnp.array(widths), jnp.max(drafted.size))
        held = below if self.shares else (below, caches[1])

        def due(number: int, carry: Any) -> Array:
            return (chosen == number) & ~carry[0]

        def of(width: int) -> Callable[[Any], tuple[Array, Block, Cache, Counts]]:
            def narrow(carry: Any) -> tuple[Array, Block, Cache, Counts]:
                # With what changes in the loop, or XLA would compute beforehand what every width needs.
                (draft, rows_now, counts), (_, _, now, _) = lax.optimization_barrier(
                    ((drafted, rows, drafter_counts), carry)
                )
                cut = Block._make((*(x[:, : width + 1] for x in draft[:-1]), draft.size))
                lower = now if self.shares else now[0]
                block, *rest = verified(params, now, rows_now, eos_id, cut, lower, counts)
                columns = (fitted(x, (self.width, *x.shape[2:])) for x in block[:-1])
                return jnp.array(True), Block._make((*columns, block.size)), *rest

            return narrow

        shapes = jax.eval_shape(of(widths[-1]), (None, None, held, None))
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes[1], shapes[3]))
        carry = jnp.array(False), blank[0], held, blank[1]
        # Loops of one round or none: XLA copies whole caches that a conditional writes to.
        for number, width in enumerate(widths):
            carry = lax.while_loop(partial(due, number), of(width), carry)
        return carry[1:]


@dataclasses.dataclass(frozen=True)
class Adaptive(Narrowed):
    """Speculative with drafts of up to `block_size` tokens, which end early when more do not pay off.

    A row stops before drawing a token if the estimated probability that its whole draft, including that
    token, is accepted is below `stop_below`. The estimate is the product of the drafter's confidence() at
    each position, corrected by the row's bias (Experience). This is exact for every method: the decision uses
    the distributions up to the next token but not that token, so each drafted token still follows its
    distribution. (Dropping a token after drawing it, because its probability is small, would not be exact.)
    The distribution at which it stops serves the bonus position.

    A lossless row needs no distribution there, so it decides one step earlier, before its drafter runs, with
    the row's acceptance so far as the next position's estimate. It drafts at least one token.
    """

    stop_below: float = STOP_BELOW
    remembers: ClassVar[bool] = True

    def plain(self, counts: Counts) -> dict[str, Any]:
        return {"drafter_passes": int(counts[0].passes), **counts[1].plain()}

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        block, caches, ((passes, sure), counts) = super().step(params, caches, rows, eos_id)
        tested = counts.accepted + (counts.accepted < counts.drafted)
        inside = jnp.arange(self.width) < tested[:, None]
        seen = Experience(passes, tested, counts.accepted, jnp.sum(jnp.where(inside, sure, 0.0), axis=1))
        return block, caches, (seen, counts)

    def _draft(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        rows = rows._replace(noise=rows.noise.within(self.level, rows.start))
        lossless = jnp.array([method.lossless and self.spares for method in self.methods])
        spared = lossless[rows.methods[:, self.level - 1]]
        want = None if rows.want is None else jnp.minimum(self.block_size + 1, rows.want)
        limit = self.block_size if want is None else want - 1
        seen: Experience | None = None if rows.so_far is None else rows.so_far[0]
        bias, acceptance = (0.0, ACCEPTANCE) if seen is None else (seen.bias, seen.acceptance)

        def ask(drafter: Sampler, carry: Any) -> Any:
            """The law of every unfinished row's next token, and the token if the row continues. All of these
            rows are at column n; a row that has stopped keeps its earlier columns."""
            n, drafted, caches, recent, passes, sure, chance, on = carry
            at = rows._replace(
                recent=recent, start=rows.start + passes, want=None, so_far=None, room=on.astype(jnp.int32)
            )
            if whole is None:
                block, caches, _ = step(drafter, params, caches, at, eos_id)
            else:
                block = Block._make(
                    (*(lax.dynamic_slice_in_dim(x, n, 1, axis=1) for x in whole[:-1]), at.room)
                )
            estimate = confidence(block.untransformed[:, 0])
            chance = chance * jnp.clip(estimate + bias, 0.0, 1.0)
            takes = self.goes_on(chance, block, spared) & on & (drafted.size < limit)
            *columns, sure = (
                lax.dynamic_update_slice_in_dim(old, new, n, axis=1)
                for old, new in ((*zip(drafted[:-1], block[:-1], strict=True), (sure, estimate[:, None])))
            )
            size, recent = drafted.size + takes, after(block._replace(size=1 * takes), recent)
            enough = (size == limit) | (chance * acceptance < self.stop_below)
            on_now = takes & (recent[:, -1] != eos_id) & ~(spared & enough)
            return n + 1, Block._make((*columns, size)), caches, recent, passes + on, sure, chance, on_now

        whole: Block | None = None  # the draft of a drafter that writes it in one step, whatever is taken
        if self._at_once:
            at = rows._replace(want=want, so_far=None, room=jnp.where(rows.room > 0, self.width, 0))
            whole, caches, _ = step(self.reader, params, caches, at, eos_id)
        none = jnp.zeros_like(rows.room)
        columns = jnp.zeros((len(none), self.width), jnp.int32)
        laws = jnp.zeros((*columns.shape, self.verifier.vocab_size))
        blank = Block(columns, laws, laws, columns, none)
        carry = ask(
            self.reader,
            (
                0,
                blank,
                caches,
                rows.recent,
                none,
                jnp.zeros((len(none), self.width)),
                jnp.ones(len(none)),
                rows.room > 0,
            ),
        )
        carry = lax.while_loop(lambda carry: jnp.any(carry[-1]), partial(ask, self.drafter), carry)
        _, drafted, caches, _, passes, sure, *_ = carry
        return drafted, caches, (passes if whole is None else jnp.minimum(rows.room, 1), sure)

    def goes_on(
        self, chance: Float[Array, " B"], block: Block, spared: Bool[Array, " B"]
    ) -> Bool[Array, " B"]:
        """Whether to take the token of `block` into the draft. Its law may be asked, the token itself not."""
        return spared | (chance >= self.stop_below)
