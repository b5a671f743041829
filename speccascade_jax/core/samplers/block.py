"""Drafts written in one pass: the distribution at every position is known before a token is drawn (DFlash,
Chen et al. 2026, arXiv 2602.06036).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Int

from speccascade_jax.core.nests import network_of
from speccascade_jax.core.protocols import (
    MASK,
    UNSEEN,
    Block,
    Cache,
    Counts,
    LanguageModel,
    Laws,
    Origin,
    Params,
    Rows,
    Sampler,
)
from speccascade_jax.core.randomness import Role, draw
from speccascade_jax.core.rounds import cut_after, read, uniforms
from speccascade_jax.core.samplers.autoregressive import Autoregressive, laws_of
from speccascade_jax.core.transforms import token_probs


@dataclasses.dataclass(frozen=True)
class Parallel:
    """One model, up to `width` tokens per step. Counts its passes, [B].

    The model reads the last committed token and width - 1 masks, and predicts what follows each of them. The
    tokens of a step are independent given the prefix, and their laws depend on how far into the step they
    are. The model caches nothing of what it reads: its part of the cache is what its verifier has left there,
    so that it covers no drafted token when a step returns. It drafts, and writes no text by itself.

    Masks see each other, so a draft's laws depend on how many there are: in a row that wants fewer tokens
    than `width`, the rest is UNSEEN, and the draft is that of a sampler of that width.
    """

    model: LanguageModel
    width: int
    behind: int = 0  # as in Autoregressive
    level: int = dataclasses.field(default=0, init=False)
    at_once: ClassVar[bool] = True  # a step emits as many tokens as there is room for, up to its width

    @property
    def models(self) -> Any:
        return network_of(self.model)

    @property
    def overhang(self) -> int:
        return self.width + self.behind

    def plain(self, counts: Counts) -> dict[str, Any]:
        return {"model_passes": int(counts)}

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        count = len(rows.room)
        masks = jnp.full((count, self.width - 1), MASK)
        if rows.want is not None:
            masks = jnp.where(jnp.arange(1, self.width) < rows.want[:, None], masks, UNSEEN)
        if self.behind:  # read() repeats the last column in rows that lack less
            masks = jnp.pad(masks, ((0, 0), (0, 1)), constant_values=UNSEEN)
        logits, caches = read(self.model, params, caches, rows, self.behind, masks)
        logits = logits[:, : self.width]
        probs = token_probs(logits, rows.options)
        places = uniforms(rows, self.level, Role.DRAW, self.width)
        tokens = draw(places.reshape(-1), probs.reshape(-1, probs.shape[-1])).reshape(count, self.width)
        size = jnp.minimum(cut_after(tokens, jnp.full(count, self.width), eos_id), rows.room)
        block = Block(
            tokens, probs, jax.nn.softmax(logits, axis=-1), jnp.full_like(tokens, Origin.MODEL), size
        )
        return block, caches, jnp.minimum(rows.room, 1)

    def laws(self, params: Params, caches: Cache, rows: Rows, tokens: Int[jax.Array, "B N"]) -> Laws:
        """What the model predicts after each token, without masks: not what it drafts from."""
        return laws_of(self.model, params, caches, rows, tokens)

    def states_law(self, methods: Sequence[Any]) -> bool:
        """A draft's distributions depend on where the round begins."""
        return False


def drafting(model: LanguageModel, block_size: int) -> Sampler:
    """The sampler that drafts up to `block_size` tokens, and one more whose law serves the bonus position."""
    at_once = getattr(model, "drafts_at_once", None) is not None
    return Parallel(model, block_size + 1) if at_once else Autoregressive(model)
