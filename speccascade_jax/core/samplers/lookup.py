"""Drafts without a model: the tokens that followed an earlier occurrence of the last tokens (prompt lookup).

They are found in the source, the prompt and the text so far, and in stored texts, if any, which are the only
parameters. Proposals depend only on the prefix, so their distributions are one-hot, and the output
distribution does not depend on their quality.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from speccascade_jax.core.nests import by_row, fitted
from speccascade_jax.core.protocols import NO_TOKEN, AnyArray, Params, Prefix, Rows
from speccascade_jax.core.rounds import cut_after
from speccascade_jax.core.samplers.proposals import Drafts
from speccascade_jax.core.samplers.stored import LONGEST, Match, Stored, search

Array = jax.Array
LookupParams = Stored | tuple[()]
"""The texts to search besides a row's own, if any."""


class Text(NamedTuple):
    """The text to search. Entries of `tokens` at or past `length` are scratch."""

    source: Int[Array, "B S"]  # what an encoder reads; S = 0 where the text begins with the prompt
    source_length: Int[Array, " B"]
    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A LanguageModel whose parameters are stored texts, if any: its cache is the text, and the token that
    followed the longest match is certain. Without a match all tokens are equally likely."""

    vocab_size: int
    start_id: int | None  # what the verifier's outputs begin with; None: its prompt
    sparse: ClassVar[bool] = True  # many rounds have no draft

    def params_from(self, params_of: Any) -> LookupParams:
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
        match = jax.vmap(lambda end: self.match(params, cache._replace(length=end), 1), 1, 1)(ends)
        law = jax.nn.one_hot(match.tokens[..., 0], self.vocab_size)
        logits = jnp.where((match.match > 0)[..., None], jnp.log(law), 0.0)
        return logits, cache._replace(length=ends[:, -1])

    def roll_back(self, cache: Text, length: Int[AnyArray, " B"]) -> Text:
        return cache._replace(length=jnp.asarray(length))

    def draft(
        self, params: LookupParams, cache: Text, rows: Rows, limit: Int[Array, " B"], count: int, eos_id: int
    ) -> tuple[Drafts, Text]:
        """The tokens after the longest match, up to and including the first eos_id, and the text with
        them."""
        match, cache = self.find(params, cache, rows, limit, count, eos_id)
        return Drafts(match.tokens, match.size, jnp.zeros_like(match.size)), cache

    def find(
        self, params: LookupParams, cache: Text, rows: Rows, limit: Int[Array, " B"], count: int, eos_id: int
    ) -> tuple[Match, Text]:
        """Like draft(), with the length of the match."""
        text = placed(cache.tokens, rows.recent, rows.start - rows.recent.shape[1])
        match = self.match(params, cache._replace(tokens=text, length=rows.start), count)
        size = jnp.minimum(cut_after(match.tokens, match.size, eos_id), limit)
        text = placed(text, match.tokens, rows.start)
        return match._replace(size=size), cache._replace(tokens=text, length=rows.start + size)

    def match(self, params: LookupParams, text: Text, count: int) -> Match:
        """The longest match in the text and the stored texts; of equally long ones, that in stored texts,
        which has been chosen among many."""
        inside = match_in(text, count)
        if not params:
            return inside
        outside = search(params, last_of(text), count)
        chosen: Match = by_row(outside.match >= inside.match, outside, inside)
        return chosen


def match_in(text: Text, count: int) -> Match:
    """The tokens that follow the longest earlier occurrence, in the source or the text, of the text's last
    tokens. Among equally long matches, the first one in the source counts, or else the last one in the
    text."""
    width, length = text.source.shape[1], text.tokens.shape[1]
    both, column = jnp.concatenate([text.source, text.tokens], axis=1), jnp.arange(width + length)
    ends = jnp.where(column < width, text.source_length[:, None], width + text.length[:, None])
    # One number for each place: its match, then its order among equals in the lower bits.
    match = matches(both, column - jnp.where(column < width, 0, width), column + 1 < ends, last_of(text))
    order = jnp.where(column < width, width + length - column, column - width)
    bits = (width + length).bit_length()
    best = jnp.max(jnp.where(match > 0, (match << bits) + order, 0), axis=1)
    match, order = best >> bits, best & ((1 << bits) - 1)
    first = 1 + jnp.where(order > length, width + length - order, width + order)
    end = jnp.where(first <= width, text.source_length, width + text.length)
    tokens = jnp.take_along_axis(both, first[:, None] + jnp.arange(count), axis=1, mode="clip")
    return Match(tokens, jnp.where(match > 0, jnp.minimum(end - first, count), 0), match)


def last_of(text: Text) -> Int[Array, "B LONGEST"]:
    """The text's last tokens, the newest first; NO_TOKEN before its beginning."""
    place = text.length[:, None] - 1 - jnp.arange(LONGEST)
    return jnp.where(place >= 0, jnp.take_along_axis(text.tokens, place, axis=1, mode="clip"), NO_TOKEN)


def matches(
    tokens: Int[Array, "B W"], before: Int[Array, " W"], followed: Bool[Array, "B W"], last: Int[Array, "B N"]
) -> Int[Array, "B W"]:
    """The number of the `last` tokens, from the newest back, that match the tokens up to each place, with
    `before` tokens before it; 0 for a place that is not `followed` by a token."""
    same, match, column = followed, jnp.zeros_like(tokens), jnp.arange(tokens.shape[1])
    for n in range(last.shape[1]):
        token = last[:, n, None]
        earlier = jnp.take(tokens, column - n, axis=1, mode="clip")
        same &= (n <= before) & (earlier == token) & (token != NO_TOKEN)
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
