"""Drafts without a model: the tokens that followed an earlier occurrence of the last tokens (prompt lookup).

They are found in the source, the prompt and the text so far, without any parameters. Proposals depend only on
the prefix, so their distributions are one-hot, and the output distribution does not depend on their quality.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from speccascade_jax.core.nests import fitted
from speccascade_jax.core.protocols import NO_TOKEN, AnyArray, Params, Prefix, Rows
from speccascade_jax.core.rounds import cut_after
from speccascade_jax.core.samplers.proposals import Drafts

Array = jax.Array
LONGEST = 3  # most tokens compared; longer matches predicted no better


class Text(NamedTuple):
    """The text to search. Entries of `tokens` at or past `length` are scratch."""

    source: Int[Array, "B S"]  # what an encoder reads; S = 0 where the text begins with the prompt
    source_length: Int[Array, " B"]
    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]


class Match(NamedTuple):
    """The tokens after the longest match."""

    tokens: Int[Array, "B G"]
    size: Int[Array, " B"]  # 0 .. G: how many of them there are
    match: Int[Array, " B"]  # 0 .. LONGEST: how many of the last tokens stood before them


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A LanguageModel without parameters: its cache is the text, and the token that followed the longest
    match is certain. Without a match all tokens are equally likely."""

    vocab_size: int
    start_id: int | None  # what the verifier's outputs begin with; None: its prompt
    sparse: ClassVar[bool] = True  # many rounds have no draft

    def params_from(self, params_of: Any) -> Params:
        return ()

    def prefill(
        self, params: Params, inputs: Int[AnyArray, "B S"], input_length: Int[AnyArray, " B"], max_length: int
    ) -> tuple[Prefix, Text]:
        inputs, source_length = jnp.asarray(inputs), jnp.asarray(input_length)
        if self.start_id is None:
            prefix, source = Prefix(inputs, source_length), inputs[:, :0]
            source_length = jnp.zeros_like(source_length)
        else:
            start = jnp.full((len(inputs), 1), self.start_id, jnp.int32)
            prefix, source = Prefix(start, jnp.ones((len(inputs),), jnp.int32)), inputs
        tokens = fitted(prefix.tokens, (max_length,))
        return prefix, Text(source, source_length, tokens, jnp.maximum(prefix.length - 1, 0))

    def extend(
        self, params: Params, tokens: Int[AnyArray, "B T"], cache: Text
    ) -> tuple[Float[Array, "B T V"], Text]:
        cache = cache._replace(tokens=placed(cache.tokens, jnp.asarray(tokens), cache.length))
        ends = cache.length[:, None] + 1 + jnp.arange(tokens.shape[1])
        match = jax.vmap(lambda end: match_in(cache._replace(length=end), 1), 1, 1)(ends)
        law = jax.nn.one_hot(match.tokens[..., 0], self.vocab_size)
        logits = jnp.where((match.match > 0)[..., None], jnp.log(law), 0.0)
        return logits, cache._replace(length=ends[:, -1])

    def roll_back(self, cache: Text, length: Int[AnyArray, " B"]) -> Text:
        return cache._replace(length=jnp.asarray(length))

    def draft(
        self, cache: Text, rows: Rows, limit: Int[Array, " B"], count: int, eos_id: int
    ) -> tuple[Drafts, Text]:
        """The tokens after the longest match, up to and including the first eos_id, and the text with
        them."""
        match, cache = self.find(cache, rows, limit, count, eos_id)
        return Drafts(match.tokens, match.size, jnp.zeros_like(match.size)), cache

    def find(
        self, cache: Text, rows: Rows, limit: Int[Array, " B"], count: int, eos_id: int
    ) -> tuple[Match, Text]:
        """Like draft(), with the length of the match."""
        text = placed(cache.tokens, rows.recent, rows.start - rows.recent.shape[1])
        match = match_in(cache._replace(tokens=text, length=rows.start), count)
        size = jnp.minimum(cut_after(match.tokens, match.size, eos_id), limit)
        text = placed(text, match.tokens, rows.start)
        return match._replace(size=size), cache._replace(tokens=text, length=rows.start + size)


def match_in(text: Text, count: int) -> Match:
    """The tokens that follow the longest earlier occurrence, in the source or the text, of the text's last
    tokens. Among equally long matches, the first one in the source counts, or else the last one in the
    text."""
    width, length = text.source.shape[1], text.tokens.shape[1]
    last = text.length[:, None] - LONGEST + jnp.arange(LONGEST)
    last = jnp.where(last >= 0, jnp.take_along_axis(text.tokens, last, axis=1, mode="clip"), NO_TOKEN)
    parts = (text.source, text.source_length), (text.tokens, text.length)
    match = jnp.concatenate([matches(tokens, size, last) for tokens, size in parts], axis=1)
    column = jnp.arange(width + length)
    rank = jnp.where(column < width, width + length - column, column - width)
    best = match * (width + length + 1) + jnp.where(match > 0, rank, 0)
    first = jnp.argmax(best, axis=1) + 1
    end = jnp.where(first <= width, text.source_length, width + text.length)
    tokens = jnp.concatenate([text.source, text.tokens], axis=1)
    tokens = jnp.take_along_axis(tokens, first[:, None] + jnp.arange(count), axis=1, mode="clip")
    match = jnp.max(match, axis=1)
    return Match(tokens, jnp.where(match > 0, jnp.minimum(end - first, count), 0), match)


def matches(
    tokens: Int[Array, "B H"], length: Int[Array, " B"], last: Int[Array, "B N"]
) -> Int[Array, "B H"]:
    """The number of the N `last` tokens, from the newest back, that match the tokens up to each place; 0 if
    none of the first `length` tokens follows the place."""
    size, count = tokens.shape[1], last.shape[1]
    before = jnp.pad(tokens, ((0, 0), (count, 0)), constant_values=NO_TOKEN)
    same, match = jnp.arange(size) < length[:, None] - 1, jnp.zeros_like(tokens)
    for n in range(count):
        token = last[:, -1 - n, None]
        same &= (before[:, count - n :][:, :size] == token) & (token != NO_TOKEN)
        match += same
    return match


def placed(old: Int[Array, "B L"], new: Int[Array, "B N"], start: Int[Array, " B"]) -> Int[Array, "B L"]:
    """`old` with the tokens of `new` from each row's `start` on; NO_TOKEN leaves what is there."""
    place = jnp.arange(old.shape[1]) - start[:, None]
    here = jnp.take_along_axis(new, jnp.clip(place, 0, new.shape[1] - 1), axis=1)
    return jnp.where((place >= 0) & (place < new.shape[1]) & (here != NO_TOKEN), here, old)


@dataclasses.dataclass(frozen=True)
class ModelFree:
    """A drafter that needs no checkpoint; its name is given instead of a folder."""

    name: str
    summary: str  # for help texts
    # (size of the verifier's vocabulary, what its outputs begin with or None) -> what drafts
    model: Callable[[int, int | None], Any]


MODEL_FREE = {
    entry.name: entry
    for entry in (ModelFree("lookup", "what followed the last tokens in the source and the text", Lookup),)
}


def split_drafter(path: str) -> tuple[ModelFree | None, str]:
    """Splits a model's path into a drafter without a checkpoint, if any, and a folder ("" for none).
    NAME+FOLDER gives both."""
    name, _, folder = path.partition("+")
    return (MODEL_FREE[name], folder) if name in MODEL_FREE else (None, path)
