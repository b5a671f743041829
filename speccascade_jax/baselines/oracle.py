"""An oracle that runs both models at every token, to measure the best quality of the rule diff."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from speccascade_jax.baselines.tally import Tally
from speccascade_jax.core.nests import roll_back
from speccascade_jax.core.protocols import Block, Cache, Counts, LanguageModel, Origin, Params, Rows
from speccascade_jax.core.randomness import Role, draw
from speccascade_jax.core.rounds import is_greedy, uniforms
from speccascade_jax.core.rules import Scores, diff, target_probs
from speccascade_jax.core.transforms import token_probs

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The rule diff with both models at every step. Only its quality is meaningful, not its time."""

    drafter: LanguageModel
    verifier: LanguageModel
    width: int = dataclasses.field(default=1, init=False)
    level: int = dataclasses.field(default=1, init=False)
    overhang: int = dataclasses.field(default=0, init=False)

    @property
    def models(self) -> tuple[LanguageModel, LanguageModel]:
        return self.drafter, self.verifier

    def plain(self, counts: Tally) -> dict[str, Any]:
        return counts.plain()

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        (q, p), caches = zip(
            *(
                model.extend(weights, rows.last[:, None], cache)
                for model, weights, cache in zip(self.models, params, caches, strict=True)
            ),
            strict=True,
        )
        scores = Scores(
            jax.nn.softmax(q, axis=-1),
            jax.nn.softmax(p, axis=-1),
            token_probs(q, rows.options),
            token_probs(p, rows.options),
            is_greedy(rows),
        )
        delta = diff(scores, rows.alphas[:, -1, None, None])
        pi = target_probs(scores.q_sampled, scores.p_sampled, delta)
        untransformed = target_probs(scores.q, scores.p, delta)
        token = draw(uniforms(rows, self.level, Role.DRAW, 1)[:, 0], pi[:, 0])
        size, deferred = jnp.minimum(rows.room, 1), delta[:, 0]
        origin = jnp.where(deferred, Origin.CORRECTION.at(1), Origin.DRAFT).astype(jnp.int32)
        deferred = size * deferred[:, 0]
        return (
            Block(token[:, None], pi, untransformed, origin, size),
            roll_back(self.models, caches, rows.start - 1 + size),
            Tally(size, size, size, size - deferred, deferred, size),
        )
