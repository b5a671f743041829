"""The sequential token-level cascade of Narasimhan et al."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from speccascade_jax.baselines.drafting import CAP, at, draft_while_confident, last_token, read
from speccascade_jax.baselines.tally import Tally
from speccascade_jax.core.nests import roll_back
from speccascade_jax.core.protocols import NO_TOKEN, Block, Cache, Counts, LanguageModel, Origin, Params, Rows
from speccascade_jax.core.randomness import Role, draw
from speccascade_jax.core.rounds import append, uniforms
from speccascade_jax.core.samplers import Autoregressive
from speccascade_jax.core.transforms import token_probs

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TokenCascade:
    """Chow's rule, token by token: the drafter writes at most `cap` tokens while max q >= 1 - alpha; then the
    verifier reads them and writes one.

    Each token follows q~ or p~, depending on q and on the number of tokens that the drafter has just written.
    """

    drafter: Autoregressive
    verifier: LanguageModel
    cap: int = CAP
    level: int = dataclasses.field(default=1, init=False)

    @property
    def width(self) -> int:
        return self.cap + 1

    @property
    def overhang(self) -> int:
        return self.cap + 2

    @property
    def models(self) -> tuple[Any, LanguageModel]:
        return self.drafter.models, self.verifier

    def plain(self, counts: Tally) -> dict[str, Any]:
        return counts.plain()

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        drafted, drafter_cache, passes = draft_while_confident(
            self.drafter, params[0], caches[0], rows, 1.0 - rows.alphas[:, -1], self.cap, eos_id
        )
        size = drafted.size
        unfinished = (size < rows.room) & (last_token(drafted, jnp.full_like(rows.last, NO_TOKEN)) != eos_id)

        logits, verifier_cache = read(
            self.verifier,
            params[1],
            jnp.concatenate([rows.last[:, None], drafted.tokens[:, :-1]], axis=1),
            jnp.max(jnp.where(unfinished, size + 1, 0)),
            caches[1],
        )
        logits = at(logits, size)
        probs = token_probs(logits, rows.options)
        token = draw(at(uniforms(rows, self.level, Role.DRAW, self.width), size), probs)

        origin = jnp.where(size == self.cap, Origin.BONUS.at(1), Origin.CORRECTION.at(1)).astype(jnp.int32)
        verifier_block = Block(
            token[:, None],
            probs[:, None],
            jax.nn.softmax(logits, axis=-1)[:, None],
            origin[:, None],
            unfinished.astype(jnp.int32),
        )
        block = append(drafted, verifier_block)
        caches = roll_back(self.models, (drafter_cache, verifier_cache), rows.start - 1 + block.size)
        deferred = (unfinished & (size < self.cap)).astype(jnp.int32)
        return block, caches, Tally(passes, verifier_block.size, size + deferred, size, deferred, block.size)
