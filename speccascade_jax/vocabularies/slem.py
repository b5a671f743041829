"""String-level exact match (Timor et al. 2025, arXiv 2502.05202, Algorithm 2): a drafter writes in its own
tokens, its text is retokenized for the verifier, and those tokens are verified.

Committed tokens never change. A draft that retokenizes badly costs only acceptance: the output follows the
verifier's distribution whatever is proposed.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.methods import Method
from speccascade_jax.core.nests import covered, insert, network_of, roll_back
from speccascade_jax.core.protocols import AnyArray, Cache, Params
from speccascade_jax.core.samplers.autoregressive import Autoregressive
from speccascade_jax.core.samplers.proposals import Matched, Proposals, Proposed
from speccascade_jax.core.verification import TOKEN, Verification
from speccascade_jax.tokenizers.tokenizer import Surface, Tokenizer, by_text, pad
from speccascade_jax.vocabularies.strategy import Strategy, refused_without_law
from speccascade_jax.vocabularies.translated import CHUNK, Translated, TranslatedParams

LEAST_CHANCE = 0.3  # drafting stops once a draft's probability is below this
WIDTHS = 4, CHUNK  # tokens that the drafter's programs read at once
LOOK_BACK = 8  # committed tokens that are retokenized with a draft, to find where it continues them


def going_on(old: Sequence[int], new: Sequence[int]) -> list[int] | None:
    """The tokens of `new` after the longest run that is also a suffix of `old`; of several equally long runs,
    the last counts. None if there is no such run."""
    best, end = 0, None
    for column in range(1, len(new) + 1):
        run = 0
        while run < min(len(old), column) and old[-1 - run] == new[column - 1 - run]:
            run += 1
        if run and run >= best:
            best, end = run, column
    return None if end is None else list(new[end:])


def longest_matches(text: bytes, ids: dict[bytes, int], longest: int) -> list[int]:
    """Splits `text` greedily into the longest tokens from the left, until none fits."""
    tokens = []
    while text:
        size = next((n for n in range(min(longest, len(text)), 0, -1) if text[:n] in ids), 0)
        if not size:
            break
        tokens.append(ids[text[:size]])
        text = text[size:]
    return tokens


def whole_characters(text: bytes) -> tuple[str, bytes]:
    """Splits off an incomplete UTF-8 character at the end: the text before it, and its bytes."""
    for held in range(min(3, len(text)), 0, -1):
        tail = text[-held:]
        if 0xC0 <= tail[0] < 0xF8 and held < (2 if tail[0] < 0xE0 else 3 if tail[0] < 0xF0 else 4):
            return text[:-held].decode(errors="replace"), tail
    return text.decode(errors="replace"), b""


class Side:
    """Converts between text and the tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.surfaces = tokenizer, tokenizer.surfaces()
        self.ids = by_text(self.surfaces)
        self.longest = max(map(len, self.ids))
        [first] = tokenizer.encode_batch(["a"])
        self.spaced = bool(first) and self._text(first).startswith(b" ")  # texts get a leading space

    def _text(self, tokens: Sequence[int]) -> bytes:
        none = Surface("padding", b"")
        return b"".join((self.surfaces[n] if 0 <= n < len(self.surfaces) else none).text for n in tokens)

    def text(self, tokens: Sequence[int], begins: bool) -> bytes:
        """The text of tokens, without the leading space if they begin a text."""
        text = self._text(tokens)
        return text[1:] if begins and self.spaced and text.startswith(b" ") else text

    def tokens(self, text: str, begins: bool) -> list[int]:
        """The tokens of a text or, if it does not begin one, of a part of a text."""
        if begins or text.startswith(" ") or not self.spaced:
            return self.tokenizer.encode_batch([text])[0]
        return longest_matches(text.encode(errors="replace"), self.ids, self.longest)


def draft(
    model: Any,
    eos_id: int,
    count: int,
    params: Params,
    allowed: Bool[AnyArray, " D"],
    cache: Cache,
    keep: Int[AnyArray, " B"],
    read: Int[AnyArray, "B W"],
    size: Int[AnyArray, " B"],
) -> tuple[Int[Array, "B count"], Int[Array, " B"], Cache]:
    """Drafts greedily among the `allowed` tokens, after rolling the cache back to `keep` positions and
    reading the first `size` tokens of `read`. Returns the drafts, their lengths, and the cache, which covers
    all but a draft's last token.

    A draft has up to `count` tokens. It ends with the end-of-sequence token, or with the token at which the
    product of the drafter's probabilities falls below LEAST_CHANCE.
    """

    def written(logits: Array, at: Any, tokens: Array, length: Array, chance: Array) -> Any:
        law = jax.nn.softmax(jnp.where(allowed, logits, -jnp.inf))
        token = jnp.argmax(law, axis=-1).astype(jnp.int32)
        length = jnp.where(chance >= LEAST_CHANCE, at + 1, length)
        chance = chance * jnp.where(token == eos_id, 0, jnp.max(law, axis=-1))
        return at + 1, tokens.at[:, at].set(token), length, chance

    def step(carry: Any) -> Any:
        cache, at, tokens, *ends = carry
        logits, cache = model.extend(params, lax.dynamic_slice_in_dim(tokens, at - 1, 1, axis=1), cache)
        return cache, *written(logits[:, 0], at, tokens, *ends)

    network, rows = network_of(model), read.shape[0]
    logits, cache = model.extend(params, read, roll_back(network, cache, keep))
    last = jnp.take_along_axis(logits, jnp.maximum(size - 1, 0)[:, None, None], axis=1)[:, 0]
    first = written(
        last,
        0,
        jnp.zeros((rows, count), jnp.int32),
        jnp.zeros(rows, jnp.int32),
        jnp.where(size > 0, 1.0, 0.0),
    )
    cache, _, tokens, length, _ = lax.while_loop(
        lambda carry: (carry[1] < count) & jnp.any(carry[-1] >= LEAST_CHANCE),
        step,
        (roll_back(network, cache, keep + size), *first),
    )
    return tokens, length, cache


class TextDrafter:
    """A drafter with another vocabulary: its programs, and the conversion of texts between it and the
    verifier."""

    def __init__(
        self,
        model: Translated,
        drafter_tokenizer: Tokenizer,
        params: TranslatedParams,
        target: Tokenizer,
        source_width: int,
        max_new_tokens: int,
    ):
        self.model, self.params, self.stretch = model.model, params.drafter, model.stretch
        self.translated, self.begins, self.tables = model, model.start_id is not None, params.tables
        self.target, self.drafter = Side(target), Side(drafter_tokenizer)
        self.source_width = model.reads(source_width)
        self.longest = math.ceil(max_new_tokens * model.stretch) + 1  # most drafter tokens read of a text
        kinds = self.drafter.surfaces
        self.allowed = np.array(
            [
                n < len(kinds) and (kinds[n].kind == "eos" or bool(kinds[n].text))
                for n in range(self.model.vocab_size)
            ]
        )
        self.draft = jax.jit(partial(draft, self.model, drafter_tokenizer.eos_id), static_argnums=0)
        self.begin = jax.jit(self._begin, static_argnums=3)
        self.insert = jax.jit(partial(insert, network_of(self.model)), static_argnums=3)
        self.compiled: set[tuple[int, int]] = set()  # (rows, draft size) of which all programs are compiled

    def sampler(
        self,
        verifier: Any,
        methods: tuple[Method, ...],
        block_size: int,
        verification: Verification | tuple[Verification, ...] = TOKEN,
    ) -> Matched:
        """The sampler that verifies its drafts."""
        drafts = Proposed(verifier.vocab_size, block_size, self.translated.start_id)
        method = methods if len(methods) > 1 else methods[0]
        return Matched(Autoregressive(drafts), verifier, method, block_size, verification=verification)

    def proposer(self, programs: Any, batch_size: int) -> "TextProposer":
        """The proposer for a scheduler's rows."""
        return TextProposer(self, programs, batch_size)

    def passes(self, count: int) -> int:
        """The usual number of drafter tokens for `count` target tokens. Pieces are numbered by frequency, and
        the n-th is assumed to occur 1 / n times as often as the first (Zipf's law). On the two kinds of texts
        and vocabularies that were tried, this was within a tenth."""
        pieces = [n for n, surface in enumerate(self.target.surfaces) if surface.kind == "piece"]
        if not pieces:
            return count
        often = 1 / np.arange(1, len(pieces) + 1)
        return math.ceil(count * float(np.average(np.asarray(self.tables.sizes)[pieces], weights=often)))

    def precompile(self, cache: Cache, rows: int, count: int) -> None:
        """Compiles the programs that draft, for caches of this shape."""
        if (rows, count) in self.compiled:
            return
        for width in WIDTHS:
            blank = np.zeros((rows, width), np.int32)
            self.draft(count, self.params, self.allowed, cache, blank[:, 0], blank, blank[:, 0])
        self.compiled.add((rows, count))

    def _begin(self, params: Params, source: Array, length: Array, count: int) -> Any:
        """The last token of the drafter's prefix, the length that the cache covers, and the cache."""
        widest = source.shape[1] + 1
        prompt = jax.eval_shape(lambda: self.model.prefill(params, source, length, widest)[0]).tokens.shape[1]
        size = prompt + self.longest + CHUNK + count
        prefix, cache = self.model.prefill(params, source, length, size)
        last = jnp.take_along_axis(prefix.tokens, jnp.maximum(prefix.length - 1, 0)[:, None], axis=1)[:, 0]
        return last, covered(self.model, cache), cache

    def drafter_tokens(self, written: Sequence[int]) -> tuple[list[int], bytes]:
        """The committed tokens in drafter tokens, and the bytes of an incomplete character at their end."""
        text, held = whole_characters(self.target.text(written, self.begins))
        return self.drafter.tokens(text, self.begins), held

    def candidates(
        self, prompt: Sequence[int], written: Sequence[int], held: bytes, drafted: Sequence[int]
    ) -> list[int]:
        """The drafted text in target tokens, as a continuation of the committed ones."""
        end = self.drafter.tokenizer.eos_id
        drafted, ended = list(drafted), end in drafted
        first = self.begins and not written
        text = self.drafter.text(drafted[: drafted.index(end)] if ended else drafted, first)
        if not text.startswith(held):
            return []
        text, tail = text[len(held) :], [self.target.tokenizer.eos_id] * ended
        said, tokens = whole_characters(text)[0], None
        if first:
            tokens = self.target.tokens(said, True)
        elif said and not held:
            old = [*(() if self.begins else prompt), *written][-LOOK_BACK:]
            before, _ = whole_characters(self.target.text(old, False))
            tokens = going_on(old, self.target.tokenizer.encode_batch([before + said])[0])
        if tokens is None:
            tokens = longest_matches(text, self.target.ids, self.target.longest)
        return tokens + tail


@dataclasses.dataclass
class Row:
    """What the drafter's cache holds of a request: `begun` positions of its prompt, followed by `tokens`."""

    number: int
    begun: int
    last: int  # the prompt's last token, which is read first
    tokens: list[int]


Running = Mapping[int, tuple[int, Any]]
"""row -> (number, request) of the running rows."""


class TextProposer:
    """Drafts for the rows of one scheduler, partly on the host and partly in the drafter's programs."""

    def __init__(self, drafter: TextDrafter, programs: Any, batch_size: int):
        if programs.devices > 1:
            raise FieldError(
                "vocabulary", "slem", "use vocabulary tli, or one device.", "slem decodes on one device"
            )
        self.drafter, self.programs, self.batch_size = drafter, programs, batch_size
        self.block_size = programs.plan.sampler.models[0].block_size
        self.count = drafter.passes(self.block_size)
        self.cache: Any = None
        self.drafting: dict[int, Row] = {}

    def __call__(self, running: Running, written_by: Callable[[int], list[int]]) -> Proposals:
        """The next drafts of the running rows. written_by(row) returns the tokens that a row has written."""
        self._begin_rows(running)
        drafter, rows = self.drafter, self.batch_size
        written, held = {}, {}
        keep, reads = np.zeros(rows, np.int32), [[0] for _ in range(rows)]
        for row in running:
            known = self.drafting[row]
            # A row without drafts so far has written nothing.
            written[row] = written_by(row) if known.tokens else []
            ids, held[row] = drafter.drafter_tokens(written[row])
            wanted = [known.last, *ids][: drafter.longest]
            same = next(
                (n for n, (a, b) in enumerate(zip(known.tokens, wanted, strict=False)) if a != b),
                min(len(known.tokens), len(wanted)),
            )
            same = min(same, len(wanted) - 1)
            keep[row], reads[row], known.tokens = known.begun + same, wanted[same:], wanted
        while max(map(len, reads)) > CHUNK:  # a new text, read from its beginning
            parts = [ids[:CHUNK] if len(ids) > CHUNK else [] for ids in reads]
            *_, self.cache = self._drafted(keep, parts, CHUNK)
            keep += np.array([len(part) for part in parts], np.int32)
            reads = [ids[len(part) :] for ids, part in zip(reads, parts, strict=True)]
        needed = max(map(len, reads))
        *drafted, self.cache = self._drafted(keep, reads, next(n for n in WIDTHS if n >= needed))
        (drafted, passes), proposed = self.programs.fetch(drafted), list[list[int]]([] for _ in range(rows))
        for row, (_, request) in running.items():
            draft_tokens = drafted[row, : passes[row]].tolist()
            candidates = drafter.candidates(request.tokens, written[row], held[row], draft_tokens)
            proposed[row] = candidates[: self.block_size]
            self.drafting[row].tokens += draft_tokens[:-1]
        tokens, size = pad(proposed, self.block_size, 0)
        return Proposals(tokens, size, passes, np.zeros(rows, np.int32))

    def _begin_rows(self, running: Running) -> None:
        """Lets the drafter read the sources of new rows."""
        drafter, rows = self.drafter, self.batch_size
        fresh = [
            row
            for row, (number, _) in running.items()
            if row not in self.drafting or self.drafting[row].number != number
        ]
        if not fresh:
            return
        sources = [running[row][1].foreign[drafter.translated] for row in fresh]
        source, length = pad(sources + [[]] * (rows - len(sources)), drafter.source_width, 0)
        last, begun, cache = self.programs.call(drafter.begin, drafter.params, source, length, self.count)
        slots = np.array(fresh + [rows] * (rows - len(fresh)), np.int32)
        if self.cache is None:
            cache, self.cache = cache, cache
        self.cache = self.programs.call(drafter.insert, self.cache, cache, slots, False)
        last, begun = self.programs.fetch((last, begun))
        drafter.precompile(self.cache, rows, self.count)
        for n, row in enumerate(fresh):
            self.drafting[row] = Row(running[row][0], int(begun[n]), int(last[n]), [])

    def _drafted(self, keep: np.ndarray, reads: list[list[int]], width: int) -> Any:
        drafter, (read, size) = self.drafter, pad(reads, width, 0)
        return self.programs.call(
            drafter.draft, self.count, drafter.params, drafter.allowed, self.cache, keep, read, size
        )


SLEM = Strategy(
    "slem",
    "the drafter writes text, which is read in the verifier's tokens and matched",
    drafts=TextDrafter,
    refusal=partial(refused_without_law, "slem", alternative="vocabulary tli, or "),
    max_models=2,
    adaptive=False,
)
