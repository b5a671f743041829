"""Converts tokens to pieces of text that never have to be retracted."""

from typing import NamedTuple

from speccascade_jax.scheduling.scheduler import Result
from speccascade_jax.serving.protocol import UNFINISHED
from speccascade_jax.tokenizers.tokenizer import Tokenizer, text_of


class Piece(NamedTuple):
    """The text of one token: "" for the end-of-sequence token and for incomplete characters."""

    text: str
    token: int
    origin: str
    level: int


class Pieces:
    """The growing text of one answer.

    Bytes of an unfinished character and possible beginnings of a stop text are held back, so the pieces of
    all calls together are the text of the answer.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]):
        self.tokenizer, self.stop = tokenizer, stop
        self.ends: list[int] = []  # where each token's text ends
        self.text = ""  # text of all tokens without an unfinished character at its end
        self.solid = 0  # tokens up to the last one that completes a character
        self.sent = 0  # tokens returned so far

    def of(self, result: Result, finished: bool) -> list[Piece]:
        """The new pieces that are final, one per token."""
        tokens = result.tokens
        for n in range(len(self.ends), len(tokens)):
            text = self.tokenizer.decode(tokens[: n + 1])
            if text.startswith(self.text) and not text.endswith(UNFINISHED):
                self.text, self.solid = text, n + 1
            self.ends.append(len(self.text))
        if finished:
            text = text_of(self.tokenizer, tokens, self.stop)
            ends = [min(end, len(text)) for end in self.ends]
            ends[-1:] = [len(text)] * bool(ends)  # text that was held back belongs to the last token
            certain = len(tokens)
        else:
            text, ends = self.text, self.ends
            safe = len(text) - held_back(text, self.stop)
            certain = next((n for n, end in enumerate(ends[: self.solid]) if end > safe), self.solid)
        begin, self.sent = self.sent, max(certain, self.sent)
        return [
            Piece(text[ends[n - 1] if n else 0 : ends[n]], tokens[n], result.origin[n], result.level[n])
            for n in range(begin, certain)
        ]


def held_back(text: str, stop: tuple[str, ...]) -> int:
    """The length of the longest suffix of `text` that is a prefix of some stop text."""
    longest = max(map(len, stop), default=0)
    return next(
        (
            n
            for n in range(min(longest, len(text)), 0, -1)
            if any(sequence.startswith(text[len(text) - n :]) for sequence in stop)
        ),
        0,
    )
