"""Autoregressive decoding: one model, one token per step."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Int

from speccascade_jax.core.nests import network_of, roll_back
from speccascade_jax.core.protocols import Block, Cache, Counts, LanguageModel, Laws, Origin, Params, Rows
from speccascade_jax.core.randomness import Role, draw
from speccascade_jax.core.rounds import read, uniforms
from speccascade_jax.core.transforms import token_probs


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """One model that writes one token per step. Counts its passes, [B]."""

    model: LanguageModel
    behind: int = 0  # committed tokens, besides the last, that its cache may lack; they are read first
    width: int = dataclasses.field(default=1, init=False)
    level: int = dataclasses.field(default=0, init=False)
    overhang: int = dataclasses.field(default=0, init=False)
    catches_up: ClassVar[bool] = True

    @property
    def models(self) -> Any:
        return network_of(self.model)

    def plain(self, counts: Counts) -> dict[str, Any]:
        return {"model_passes": int(counts)}

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        logits, caches = read(self.model, params, caches, rows, self.behind, rows.recent[:, :0])
        probs = token_probs(logits, rows.options)
        token = draw(uniforms(rows, self.level, Role.DRAW, 1)[:, 0], probs[:, 0])
        size = jnp.minimum(rows.room, 1)
        block = Block(
            token[:, None],
            probs,
            jax.nn.softmax(logits, axis=-1),
            jnp.full_like(token, Origin.MODEL)[:, None],
            size,
        )
        return block, roll_back(self.models, caches, rows.start - 1 + size), size

    def laws(self, params: Params, caches: Cache, rows: Rows, tokens: Int[jax.Array, "B N"]) -> Laws:
        return laws_of(self.model, params, caches, rows, tokens)


def laws_of(
    model: LanguageModel, params: Params, cache: Cache, rows: Rows, tokens: Int[jax.Array, "B N"]
) -> Laws:
    """A model's distributions after each of `tokens`."""
    logits, _ = model.extend(params, tokens, cache)
    return jax.nn.softmax(logits, axis=-1), token_probs(logits, rows.options)
