"""Lookup next to a drafter: each row's round is drafted by whichever is expected to yield more tokens."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from speccascade_jax.core.nests import by_row, roll_back
from speccascade_jax.core.protocols import AnyArray, Block, Cache, Counts, Params, Rows
from speccascade_jax.core.samplers.adaptive import ACCEPTANCE
from speccascade_jax.core.samplers.autoregressive import Autoregressive
from speccascade_jax.core.samplers.lookup import Lookup, Text, placed
from speccascade_jax.core.samplers.speculative import Speculative
from speccascade_jax.core.transforms import token_probs
from speccascade_jax.core.verification import leading

Array = jax.Array
LEAST = 2  # tokens of a match from which its draft is considered: after one, few drafts are right
LOOKED_UP = 0.7  # assumed acceptance of looked-up tokens in a row without any
PRIOR = 8.0  # tested tokens by which that and ACCEPTANCE are believed before a row has any


@dataclasses.dataclass(frozen=True)
class WithLookup:
    """`drafter`, or where the text already reaches further than the committed tokens, its next token."""

    drafter: Autoregressive
    lookup: Lookup
    behind: int = 0  # as Autoregressive's
    width: int = dataclasses.field(default=1, init=False)
    level: int = dataclasses.field(default=0, init=False)
    overhang: int = dataclasses.field(default=0, init=False)

    @property
    def models(self) -> Any:
        return self.lookup, self.drafter.models

    @property
    def reader(self) -> Autoregressive:
        return dataclasses.replace(self.drafter, behind=self.behind)

    def plain(self, counts: Counts) -> dict[str, Any]:
        return self.drafter.plain(counts)

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        text, below = caches
        block, below, counts = self.reader.step(params[1], below, rows, eos_id)
        token = jnp.take_along_axis(text.tokens, rows.start[:, None], axis=1, mode="clip")
        law = jax.nn.one_hot(token, block.probs.shape[-1])
        certain = Block(token, law, law, block.origin, block.size)
        return by_row(rows.start < text.length, certain, block), (text, below), counts


class Tried(NamedTuple):
    """Statistics of each row's drafter and lookup, [B]. A sampler counts them in one array [B, 6], because
    adding six arrays in every round takes longer.

    Every lookup is compared with the committed tokens, whether it was used as the draft or not. Of the
    drafter's tokens, only those up to and including a rejection count, as in adaptive.Experience.
    """

    passes: Any
    looked_up: Any  # rounds whose draft was looked up
    tested: Any
    kept: Any
    text_tested: Any
    text_kept: Any

    @classmethod
    def of(cls, counts: Int[AnyArray, "*B 6"]) -> "Tried":
        return cls(*(counts[..., n] for n in range(counts.shape[-1])))

    @property
    def counts(self) -> Int[Array, "B 6"]:
        return jnp.stack(self, axis=-1)

    def acceptance(self) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
        """The estimated acceptance probabilities of the drafter's tokens and of tokens that are looked up."""
        return (
            (self.kept + PRIOR * ACCEPTANCE) / (self.tested + PRIOR),
            (self.text_kept + PRIOR * LOOKED_UP) / (self.text_tested + PRIOR),
        )


def expected(
    acceptance: float | Float[Array, " B"], count: int | Int[Array, " B"], block_size: int
) -> Float[Array, " B"]:
    """1 + a + .. + a^n, the tokens that a round of n <= `block_size` drafts yields."""
    tokens = jnp.ones(jnp.shape(count))
    for n in range(block_size, 0, -1):
        tokens = jnp.where(n <= count, 1 + acceptance * tokens, tokens)
    return tokens


@dataclasses.dataclass(frozen=True)
class Choosing(Speculative):
    """Speculative whose `drafter` is a WithLookup: a round's draft is looked up if at least as many of its
    tokens are expected to be accepted as of the drafter's.

    The choice depends on what is committed and on which drafted tokens stood, so each drafted token follows
    its law, which is one-hot for what is looked up. The drafter reads such a draft, and its law serves the
    bonus position.
    """

    remembers: ClassVar[bool] = True
    by_prefix: ClassVar[bool] = False  # a token's law depends on who drafted it
    sized: ClassVar[bool] = False

    def plain(self, counts: Counts) -> dict[str, Any]:
        tried, verified = Tried.of(counts[0]), counts[1]
        return {"drafter_passes": int(tried.passes), "looked_up": int(tried.looked_up), **verified.plain()}

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        block, caches, ((passes, looked_up, match), counts) = super().step(params, caches, rows, eos_id)
        below = caches if self.shares else caches[0]
        below = placed_in(below[0], block.tokens, rows.start), *below[1:]
        caches = below if self.shares else (below, caches[1])
        considered = match.match >= LEAST
        known = jnp.where(considered, jnp.minimum(match.size, block.size), 0)
        inside = jnp.arange(self.block_size) < known[:, None]
        kept = leading((match.tokens == block.tokens[:, : self.block_size]) & inside)
        tested = jnp.where(looked_up, 0, counts.accepted + (counts.accepted < counts.drafted))
        accepted = jnp.where(looked_up, 0, counts.accepted)
        tried = Tried(passes, 1 * looked_up, tested, accepted, kept + (kept < known), kept)
        return block, caches, (tried.counts, counts)

    def _draft(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        (text, below), active = caches, rows.room > 0
        drafter: Any = self.reader
        limit = self.block_size if rows.want is None else jnp.minimum(self.block_size, rows.want - 1)
        limit = jnp.where(active, limit, 0)
        match, text = drafter.lookup.find(params[0], text, rows, limit, self.block_size, eos_id)
        tried = None if rows.so_far is None else Tried.of(rows.so_far[0])
        drafted, looked_up = (ACCEPTANCE, LOOKED_UP) if tried is None else tried.acceptance()
        block_size = self.block_size
        better = expected(looked_up, match.size, block_size) >= expected(drafted, limit, block_size)
        chosen = active & better & (match.size > 0) & (match.match >= LEAST)
        text = text._replace(length=jnp.where(chosen, text.length, rows.start - 1))

        # Where every row's draft is looked up, the drafter writes one token only, and then reads the drafts.
        every = jnp.all(chosen | ~active)
        block, (_, below), passes = self._draft_unless(every, params, (text, below), rows, eos_id)
        block = block._replace(size=jnp.where(chosen, match.size, block.size))

        def looked_up_by_all(carry: Any) -> Any:
            _, block, below = carry
            logits, below = drafter.drafter.model.extend(params[1], match.tokens, below)
            below = roll_back(drafter.drafter.models, below, rows.start + match.size)
            tokens = jnp.pad(match.tokens, ((0, 0), (0, 1)))
            certain = (jnp.arange(self.width) < match.size[:, None])[..., None]  # at least the first place
            one_hot = jax.nn.one_hot(tokens, logits.shape[-1])
            laws = token_probs(logits, rows.options), jax.nn.softmax(logits, axis=-1)
            probs, untransformed = (
                jnp.where(certain, one_hot, jnp.pad(law, ((0, 0), (1, 0), (0, 0)))) for law in laws
            )
            return jnp.array(False), Block(tokens, probs, untransformed, block.origin, block.size), below

        # A loop of one round or none: XLA copies whole caches that a conditional writes to.
        _, block, below = lax.while_loop(lambda carry: carry[0], looked_up_by_all, (every, block, below))
        return block, (text, below), (jnp.where(chosen, 1, passes), chosen, match)


def placed_in(text: Text, tokens: Int[Array, "B N"], start: Int[Array, " B"]) -> Text:
    """The text with the tokens that a round has written."""
    return text._replace(tokens=placed(text.tokens, tokens, start))
