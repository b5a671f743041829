"""The big little decoder of Kim et al. (2023), as described and as released."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from speccascade_jax.baselines.drafting import CAP, at, draft_while_confident, last_token, read
from speccascade_jax.baselines.tally import Tally
from speccascade_jax.core.nests import roll_back
from speccascade_jax.core.protocols import NO_TOKEN, Block, Cache, Counts, LanguageModel, Origin, Params, Rows
from speccascade_jax.core.rounds import cut_after
from speccascade_jax.core.samplers import Autoregressive
from speccascade_jax.core.transforms import first

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Bild:
    """Big little decoder (Kim et al. 2023). It is greedy at any temperature.

    The verifier writes the first token. Then the drafter writes until max q < `fallback` or it has written
    `window` tokens. The verifier scores them and replaces the first token with -log p > alpha that differs
    from its own choice by that choice; if there is none, it adds a token. A text that the drafter ends is
    checked as well.

    `compat` follows the released code instead: it checks only the first position with -log p > alpha, never
    checks an end that the drafter writes, and adds another verifier token after a replacement, so that a
    replacement by an end-of-sequence token does not end the text.
    """

    drafter: Autoregressive
    verifier: LanguageModel
    fallback: float = 0.6
    window: int = CAP
    compat: bool = False
    level: int = dataclasses.field(default=1, init=False)

    @property
    def width(self) -> int:
        return self.window + 1 + self.compat

    @property
    def overhang(self) -> int:
        return self.window + 3

    @property
    def models(self) -> tuple[Any, LanguageModel]:
        return self.drafter.models, self.verifier

    def plain(self, counts: Tally) -> dict[str, Any]:
        return counts.plain()

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        rows = rows._replace(options=rows.options.with_temperature(jnp.zeros_like(rows.options.temperature)))
        threshold = jnp.where(rows.recent[:, -2] == NO_TOKEN, jnp.inf, self.fallback)
        drafted, drafter_cache, passes = draft_while_confident(
            self.drafter, params[0], caches[0], rows, threshold, self.window, eos_id
        )
        active, count = rows.room > 0, drafted.size
        ended = (count == rows.room) | (last_token(drafted, jnp.full_like(rows.last, NO_TOKEN)) == eos_id)
        checked = active & ~ended if self.compat else active

        draft = drafted.tokens[:, :-1]
        logits, verifier_cache = read(
            self.verifier,
            params[1],
            jnp.concatenate([rows.last[:, None], draft], axis=1),
            jnp.max(jnp.where(checked, count + 1, 0)),
            caches[1],
        )
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        chances = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1], axis=-1), draft[..., None], axis=-1)
        far = -chances[..., 0] > rows.alphas[:, -1:]
        far &= (jnp.arange(self.window) < count[:, None]) & checked[:, None]
        differs = best[:, :-1] != draft
        if self.compat:
            far &= jnp.cumsum(far, axis=1) == 1  # only the first
        stop = jnp.minimum(first(far & differs), count)

        column = jnp.arange(self.window + 1)
        tokens = jnp.where(column == stop[:, None], at(best, stop)[:, None], drafted.tokens)
        replaced = stop < count
        next_origin = jnp.where(replaced, Origin.CORRECTION.at(1), Origin.BONUS.at(1))[:, None]
        origin = jnp.where(column == stop[:, None], next_origin, Origin.DRAFT).astype(jnp.int32)
        if self.compat:
            verifier_cache = roll_back(self.verifier, verifier_cache, rows.start + stop)
            added = at(tokens, stop)
            logits, verifier_cache = read(
                self.verifier, params[1], added[:, None], jnp.max(replaced.astype(jnp.int32)), verifier_cache
            )
            again = replaced.astype(jnp.int32)  # the drafter has not read the replacement
            start = rows.start + jnp.where(replaced, stop, count)
            drafter_cache = roll_back(self.drafter.models, drafter_cache, start)
            _, drafter_cache, _ = self.drafter.step(
                params[0],
                drafter_cache,
                rows._replace(recent=added[:, None], start=start + 1, room=again),
                NO_TOKEN,
            )
            passes += again
            more = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            tokens, origin = (jnp.pad(x, ((0, 0), (0, 1))) for x in (tokens, origin))
            here = jnp.arange(self.width) == stop[:, None] + 1
            tokens, origin = jnp.where(here, more, tokens), jnp.where(here, Origin.BONUS.at(1), origin)
            size = jnp.where(checked, stop + 1 + replaced, count)
        else:
            size = cut_after(tokens, stop + 1, eos_id)
        size = jnp.minimum(size, rows.room)
        kept = jnp.minimum(jnp.where(checked, stop, count), size)

        law = jax.nn.one_hot(tokens, self.verifier.vocab_size)
        caches = roll_back(self.models, (drafter_cache, verifier_cache), rows.start - 1 + size)
        calls = checked.astype(jnp.int32) + (replaced if self.compat else 0)
        counts = Tally(passes, calls, count, kept, replaced.astype(jnp.int32), size)
        return Block(tokens, law, law, origin, size), caches, counts
