"""Blocks whose length each row decides for itself, losslessly: drafting stops where a draft would be lost."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float

from speccascade_jax.core.samplers import (
    Block,
    Counts,
    Rows,
    Sampler,
    Speculative,
    after,
    append,
    placed_at,
    read,
    step,
)
from speccascade_jax.core.typing import Cache, Params
from speccascade_jax.core.verification import Draft

Array = jax.Array
STOP_BELOW = 0.4
PRIOR = 4.0  # tested tokens by which the drafter's own confidence is believed before a row has any


@partial(jax.tree_util.register_dataclass, data_fields=["passes", "tested", "kept", "hoped"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Experience:
    """What each row has seen of its drafter, [B].

    Only of tested tokens, those up to and with a rejection: drafts after it meet the random numbers that the
    next block draws with, and no decision may know those.
    """

    passes: Any
    tested: Any
    kept: Any
    hoped: Any  # the sum of max q at the tested positions: what would be kept were it right

    @property
    def bias(self) -> Float[Array, " B"]:
        """How much more of the tokens is kept than the drafter's confidence says."""
        return (self.kept - self.hoped) / (self.tested + PRIOR)


@dataclasses.dataclass(frozen=True)
class Adaptive(Speculative):
    """Speculative with drafts of up to `block_size` tokens, fewer where more are not worth their time.

    A row stops before it draws a token when all of its draft, that token too, is accepted with an estimated
    chance below `stop_below`: the product of max q + bias over the draft, max q the likeliest token's
    probability in the drafter's own law at each position and bias what the row has learnt (Experience).
    That is exact for every method: the decision knows the laws up to the next token and never that token, so
    each drafted token still follows its law. (Dropping a token once it is drawn, because its own probability
    is small, would not be.) The law it stops at serves the bonus position.

    The verifier reads as many tokens as the longest draft of the batch needs, in one of three widths.
    """

    stop_below: float = STOP_BELOW
    remembers: ClassVar[bool] = True

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        block, caches, ((passes, sure), counts) = super().step(params, caches, rows, eos_id)
        tested = counts.accepted + (counts.accepted < counts.drafted)
        inside = jnp.arange(self.block_size) < tested[:, None]
        seen = Experience(passes, tested, counts.accepted, jnp.sum(jnp.where(inside, sure, 0.0), axis=1))
        return block, caches, (seen, counts)

    def _draft(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        lossless = jnp.array([method.lossless and self.spares for method in self.methods])
        spared = lossless[rows.methods[:, self.level - 1]]
        most = self.block_size if rows.want is None else jnp.minimum(self.block_size, rows.want - 1)
        bias = 0.0 if rows.so_far is None else rows.so_far[0].bias

        def ask(drafter: Sampler, carry: Any) -> Any:
            """The law of every unfinished row's next token, and the token where the row goes on."""
            drafted, caches, recent, passes, sure, chance, on = carry
            at = rows._replace(recent=recent, start=rows.start + passes, want=None, so_far=None,
                               room=on.astype(jnp.int32))
            block, caches, _ = step(drafter, params, caches, at, eos_id)
            own = jnp.max(block.own[:, 0], axis=-1)
            chance = chance * jnp.clip(own + bias, 0.0, 1.0)
            takes = self.goes_on(chance, block) & on & (drafted.size < most)
            place = jnp.where(on, drafted.size, self.width)  # a row keeps the law that it stopped at
            size = drafted.size + takes
            drafted = append(drafted._replace(size=place), block)._replace(size=size)
            sure, recent = placed_at(sure, own[:, None], place), after(block._replace(size=1 * takes), recent)
            on_now = takes & (recent[:, -1] != eos_id) & ~(spared & (size == most))
            return drafted, caches, recent, passes + on, sure, chance, on_now

        none = jnp.zeros_like(rows.room)
        columns = jnp.zeros((len(none), self.width), jnp.int32)
        laws = jnp.zeros((*columns.shape, self.verifier.vocab_size))
        blank = Block(columns, laws, laws, columns, none)
        carry = ask(self.reader, (blank, caches, rows.recent, none, jnp.zeros((len(none), self.block_size)),
                                  jnp.ones(len(none)), rows.room > 0))
        carry = lax.while_loop(lambda carry: jnp.any(carry[-1]), partial(ask, self.drafter), carry)
        drafted, caches, _, passes, sure, *_ = carry
        return drafted, caches, (passes, sure)

    def goes_on(self, chance: Float[Array, " B"], block: Block) -> Bool[Array, " B"]:
        """Whether to take the token of `block` into the draft. Its law may be asked, the token itself not."""
        return chance >= self.stop_below

    def score(self, params: Params, cache: Cache, rows: Rows, draft: Draft
              ) -> tuple[Float[Array, "B N V"], Cache]:
        """As Speculative's, the logits after tokens that no row has drafted 0."""
        whole = self.block_size
        widths = sorted({-(-whole // part) for part in (4, 2, 1)})

        def reading(width: int) -> Callable[[Cache], tuple[Array, Cache]]:
            def score(cache: Cache) -> tuple[Array, Cache]:
                tokens = draft.tokens[:, :width]
                logits, longer = read(self.verifier, params, cache, rows, self.behind, tokens)
                return jnp.pad(logits, ((0, 0), (0, whole - width), (0, 0))), longer

            return score

        needed = jnp.searchsorted(jnp.array(widths), jnp.max(draft.size))
        return lax.switch(needed, [reading(width) for width in widths], cache)
