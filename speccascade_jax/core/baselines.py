"""The baselines that run differently: token, oracle and sequence cascades, and BiLD.

They write texts and draft for nobody, for the verifier does not read the last tokens of a text. A sequence
cascade is two decodings, and only the rows that its confidence defers reach the second: inference.text runs
both.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Int

from speccascade_jax.core.metrics import Tally
from speccascade_jax.core.rules import Scores, diff, target_probs
from speccascade_jax.core.samplers import (
    NO_TOKEN,
    Autoregressive,
    Block,
    Counts,
    Origin,
    Rows,
    Sampler,
    append,
    cut_after,
    is_greedy,
    last_token,
    uniforms,
)
from speccascade_jax.core.sampling import Role, draw, first, token_probs
from speccascade_jax.core.typing import Cache, LanguageModel, Params, roll_back

Array = jax.Array
CAP = 10       # tokens the drafter writes at most before the verifier does: the paper's cap, BiLD's window
NARROW = 4     # up to so many tokens the verifier reads in a program of that width
QUANTILE = 0.4  # of the token log-probabilities, in sequence_quantile


def draft_while_confident(drafter: Autoregressive, params: Params, cache: Cache, rows: Rows,
                          threshold: Float[Array, " B"], cap: int, eos_id: int
                          ) -> tuple[Block, Cache, Int[Array, " B"]]:
    """The drafter's next tokens, its cache, and how often it was asked.

    A row stops before the first position where max q < threshold, after eos_id, and after `cap` or
    rows.room tokens. It is asked once more where it stopped short of the text's end, so that its
    cache covers its last token. The block has cap + 1 columns: room for the verifier's token.
    """
    def ask(carry: tuple) -> tuple:
        drafted, cache, last, passes, writing = carry
        at = rows._replace(last=last, start=rows.start + passes, room=writing.astype(jnp.int32))
        block, cache, _ = drafter.step(params, cache, at, NO_TOKEN)
        trusted = writing & (jnp.max(block.own[:, 0], axis=-1) >= threshold) & (drafted.size < cap)
        block = block._replace(origin=jnp.full_like(block.origin, Origin.DRAFT),
                               size=trusted.astype(jnp.int32))
        drafted, last = append(drafted, block), last_token(block, last)
        on = trusted & (last != eos_id) & (drafted.size < rows.room)
        return drafted, cache, last, passes + writing, on

    nothing = jnp.zeros_like(rows.room)
    columns, laws = (len(nothing), cap + 1), (len(nothing), cap + 1, drafter.model.vocab_size)
    blank = Block(jnp.zeros(columns, jnp.int32), jnp.zeros(laws), jnp.zeros(laws),
                  jnp.zeros(columns, jnp.int32), nothing)
    drafted, cache, _, passes, _ = lax.while_loop(
        lambda carry: jnp.any(carry[-1]), ask, (blank, cache, rows.last, nothing, rows.room > 0))
    return drafted, cache, passes


def read(verifier: LanguageModel, params: Params, tokens: Int[Array, "B N"], count: Int[Array, ""],
         cache: Cache) -> tuple[Float[Array, "B N V"], Cache]:
    """verifier.extend by the first `count` tokens or more: none, NARROW or all N; the logits after
    those that were left out are 0."""
    width = tokens.shape[1]

    def reading(size: int) -> Callable[[Cache], tuple[Array, Cache]]:
        def extend(cache: Cache) -> tuple[Array, Cache]:
            logits, longer = verifier.extend(params, tokens[:, :size], cache)
            return jnp.pad(logits, ((0, 0), (0, width - size), (0, 0))), longer

        return extend

    def nothing(cache: Cache) -> tuple[Array, Cache]:
        return jnp.zeros((*tokens.shape, verifier.vocab_size)), cache

    narrow = min(NARROW, width)
    branch = jnp.where(count == 0, 0, jnp.where(count <= narrow, 1, 2))
    return lax.switch(branch, [nothing, reading(narrow), reading(width)], cache)


def at(x: Float[Array, "B N ..."], column: Int[Array, " B"]) -> Float[Array, "B ..."]:
    """x[b, column[b]] of every row."""
    return jnp.take_along_axis(x, column.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)[:, 0]


@dataclasses.dataclass(frozen=True)
class TokenCascade:
    """Chow's rule in sequence: the drafter writes while max q >= 1 - alpha and at most `cap` tokens; the
    verifier then reads them and writes one.

    The law of a token is q~ or p~, decided by q and by how many tokens the drafter has just written.
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

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        drafted, drafter_cache, passes = draft_while_confident(
            self.drafter, params[0], caches[0], rows, 1.0 - rows.alphas[:, -1], self.cap, eos_id)
        size = drafted.size
        asked = (size < rows.room) & (last_token(drafted, jnp.full_like(rows.last, NO_TOKEN)) != eos_id)

        logits, verifier_cache = read(
            self.verifier, params[1], jnp.concatenate([rows.last[:, None], drafted.tokens[:, :-1]], axis=1),
            jnp.max(jnp.where(asked, size + 1, 0)), caches[1])
        logits = at(logits, size)
        probs = token_probs(logits, rows.options)
        token = draw(at(uniforms(rows, self.level, Role.DRAW, self.width), size), probs)

        origin = jnp.where(size == self.cap, Origin.BONUS, Origin.CORRECTION).astype(jnp.int32)
        own = Block(token[:, None], probs[:, None], jax.nn.softmax(logits, axis=-1)[:, None],
                    origin[:, None], asked.astype(jnp.int32))
        block = append(drafted, own)
        caches = roll_back(self.models, (drafter_cache, verifier_cache), rows.start - 1 + block.size)
        deferred = (asked & (size < self.cap)).astype(jnp.int32)
        return block, caches, Tally(passes, own.size, size + deferred, size, deferred, block.size)


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The rule diff with both models at every step: its quality counts, its time does not."""

    drafter: LanguageModel
    verifier: LanguageModel
    width: int = dataclasses.field(default=1, init=False)
    level: int = dataclasses.field(default=1, init=False)
    overhang: int = dataclasses.field(default=0, init=False)

    @property
    def models(self) -> tuple[LanguageModel, LanguageModel]:
        return self.drafter, self.verifier

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        (q, p), caches = zip(*(model.extend(weights, rows.last[:, None], cache) for model, weights, cache in
                               zip(self.models, params, caches, strict=True)), strict=True)
        scores = Scores(jax.nn.softmax(q, axis=-1), jax.nn.softmax(p, axis=-1), token_probs(q, rows.options),
                        token_probs(p, rows.options), is_greedy(rows))
        delta = diff(scores, rows.alphas[:, -1, None, None])
        pi = target_probs(scores.q_sampled, scores.p_sampled, delta)
        own = target_probs(scores.q, scores.p, delta)
        token = draw(uniforms(rows, self.level, Role.DRAW, 1)[:, 0], pi[:, 0])
        size, deferred = jnp.minimum(rows.room, 1), delta[:, 0]
        origin = jnp.where(deferred, Origin.CORRECTION, Origin.DRAFT).astype(jnp.int32)
        deferred = size * deferred[:, 0]
        return (Block(token[:, None], pi, own, origin, size),
                roll_back(self.models, caches, rows.start - 1 + size),
                Tally(size, size, size, size - deferred, deferred, size))


@dataclasses.dataclass(frozen=True)
class Bild:
    """Big little decoder (Kim et al. 2023), greedy whatever the temperature.

    The verifier writes the first token. Then the drafter writes until max q < `fallback` or `window`
    tokens stand; the verifier scores them, and the first with -log p > alpha that is not its own choice
    is replaced by that choice; where none is, the verifier adds a token. A text that the drafter ends is
    checked too.

    `compat` is the released code instead: it looks only at the first position with -log p > alpha,
    never checks an end that the drafter writes, and after a replacement writes one more token of the
    verifier's at once, so that a replacement that is the end is no end.
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

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        rows = rows._replace(options=dataclasses.replace(
            rows.options, temperature=jnp.zeros_like(rows.options.temperature)))
        threshold = jnp.where(rows.before == NO_TOKEN, jnp.inf, self.fallback)
        drafted, drafter_cache, passes = draft_while_confident(
            self.drafter, params[0], caches[0], rows, threshold, self.window, eos_id)
        active, count = rows.room > 0, drafted.size
        ended = (count == rows.room) | (last_token(drafted, jnp.full_like(rows.last, NO_TOKEN)) == eos_id)
        checked = active & ~ended if self.compat else active

        draft = drafted.tokens[:, :-1]
        logits, verifier_cache = read(
            self.verifier, params[1], jnp.concatenate([rows.last[:, None], draft], axis=1),
            jnp.max(jnp.where(checked, count + 1, 0)), caches[1])
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        chances = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1], axis=-1), draft[..., None], axis=-1)
        far = -chances[..., 0] > rows.alphas[:, -1:]
        far &= (jnp.arange(self.window) < count[:, None]) & checked[:, None]
        differs = best[:, :-1] != draft
        if self.compat:
            far &= jnp.cumsum(far, axis=1) == 1  # the first one alone
        stop = jnp.minimum(first(far & differs), count)

        column = jnp.arange(self.window + 1)
        tokens = jnp.where(column == stop[:, None], at(best, stop)[:, None], drafted.tokens)
        replaced = stop < count
        own = jnp.where(replaced, Origin.CORRECTION, Origin.BONUS)[:, None]
        origin = jnp.where(column == stop[:, None], own, Origin.DRAFT).astype(jnp.int32)
        if self.compat:
            verifier_cache = roll_back(self.verifier, verifier_cache, rows.start + stop)
            added = at(tokens, stop)
            logits, verifier_cache = read(self.verifier, params[1], added[:, None],
                                          jnp.max(replaced.astype(jnp.int32)), verifier_cache)
            again = replaced.astype(jnp.int32)  # the drafter has not read what was put in its token's place
            start = rows.start + jnp.where(replaced, stop, count)
            drafter_cache = roll_back(self.drafter.models, drafter_cache, start)
            _, drafter_cache, _ = self.drafter.step(params[0], drafter_cache, rows._replace(
                last=added, start=start + 1, room=again), NO_TOKEN)
            passes += again
            more = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            tokens, origin = (jnp.pad(x, ((0, 0), (0, 1))) for x in (tokens, origin))
            here = jnp.arange(self.width) == stop[:, None] + 1
            tokens, origin = jnp.where(here, more, tokens), jnp.where(here, Origin.BONUS, origin)
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


class Trace(NamedTuple):
    """What Scored counts; L is the length of the token buffer."""

    passes: Int[Array, " B"]
    log_q: Float[Array, "B L"]  # of the token drawn at each position, 0 where none was
    drawn: Int[Array, "B L"]    # 1 at these positions


@dataclasses.dataclass(frozen=True)
class Scored:
    """A drafter that remembers how sure it was of each of its tokens: a sequence cascade's first half."""

    drafter: Autoregressive
    width: int = dataclasses.field(default=1, init=False)
    level: int = dataclasses.field(default=0, init=False)
    overhang: int = dataclasses.field(default=0, init=False)

    @property
    def models(self) -> Any:
        return self.drafter.models

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        block, caches, size = self.drafter.step(params, caches, rows, eos_id)
        here = (jnp.arange(rows.noise.shape[-1]) == rows.start[:, None]) & (size > 0)[:, None]
        log_q = jnp.log(jnp.take_along_axis(block.own[:, 0], block.tokens, axis=1))
        return block, caches, Trace(size, jnp.where(here, log_q, 0.0), here.astype(jnp.int32))


CONFIDENCES: dict[str, Callable[[np.ndarray], float]] = {
    "sequence": lambda log_q: float(np.exp(np.sum(log_q))),
    "sequence_mean": lambda log_q: float(np.exp(np.mean(log_q))),
    "sequence_quantile": lambda log_q: float(np.exp(np.quantile(log_q, QUANTILE))),
}
"""A draft's confidence in [0, 1] from the log-probabilities of its tokens: the text's probability (Chow),
normalised by length, and a quantile (Gupta et al. 2024). Below 1 - alpha the verifier writes a new text."""


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A sampler of (drafter, verifier), the range of its alpha, and a summary for people."""

    sampler: Callable[[LanguageModel, LanguageModel], Sampler]
    high: float
    summary: str
    greedy: bool = False  # decodes greedily alone
    low: float = 0


def _scored(drafter: LanguageModel, verifier: Any) -> Sampler:
    return Scored(Autoregressive(drafter))


BASELINES: dict[str, Baseline] = {
    "sequence": Baseline(_scored, 1, "the drafter's text, the verifier's where its probability < 1 - alpha"),
    "sequence_mean": Baseline(_scored, 1, "as sequence, of the tokens' mean probability (geometric)"),
    "sequence_quantile": Baseline(_scored, 1, f"as sequence, of the quantile at {QUANTILE} of the tokens'"),
    "token_cascade": Baseline(lambda q, p: TokenCascade(Autoregressive(q), p), 1,
                              f"drafter until max q < 1 - alpha or {CAP} tokens, then one of the verifier's"),
    "oracle": Baseline(Oracle, 1, "diff with both models at every token: quality alone"),
    "bild": Baseline(lambda q, p: Bild(Autoregressive(q), p), np.inf,
                     "greedy: drafter until max q < 0.6; back to the first token with -log p > alpha", True),
    "bild_compat": Baseline(lambda q, p: Bild(Autoregressive(q), p, compat=True), np.inf,
                            "as bild, with the deviations of its released code", True),
}
