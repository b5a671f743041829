"""The demo's two models as an ensemble: each token is drawn from the mean of their distributions.

To try it:

    python scripts/decode.py --config=examples/ensemble.py
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from speccascade_jax.config import load
from speccascade_jax.core.nests import roll_back
from speccascade_jax.core.protocols import Block, Cache, LanguageModel, Origin, Params, Rows
from speccascade_jax.core.randomness import Role, draw
from speccascade_jax.core.rounds import uniforms
from speccascade_jax.core.transforms import token_probs


@dataclasses.dataclass(frozen=True)
class Mean:
    """One token a step, from the mean of two models' distributions. Counts its steps, [B]."""

    first: LanguageModel
    second: LanguageModel
    width: int = dataclasses.field(default=1, init=False)
    level: int = dataclasses.field(default=0, init=False)
    overhang: int = dataclasses.field(default=0, init=False)

    @property
    def models(self) -> tuple[LanguageModel, LanguageModel]:
        return self.first, self.second

    def plain(self, counts: jax.Array) -> dict[str, Any]:
        return {"model_passes": int(counts)}

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, jax.Array]:
        read = [
            model.extend(weights, rows.last[:, None], cache)
            for model, weights, cache in zip(self.models, params, caches, strict=True)
        ]
        logits, caches = zip(*read, strict=True)
        untransformed = (jax.nn.softmax(logits[0], axis=-1) + jax.nn.softmax(logits[1], axis=-1)) / 2
        probs = (token_probs(logits[0], rows.options) + token_probs(logits[1], rows.options)) / 2
        token = draw(uniforms(rows, self.level, Role.DRAW, 1)[:, 0], probs[:, 0])[:, None]
        size = jnp.minimum(rows.room, 1)
        caches = roll_back(self.models, caches, rows.start - 1 + size)
        return Block(token, probs, untransformed, jnp.full_like(token, Origin.MODEL), size), caches, size


config = dataclasses.replace(
    load("demo"), samplers={"mean": lambda models: Mean(*models)}, method="mean", alpha=0.0
)
