"""Tokens into pieces of text that never have to be taken back."""

from typing import NamedTuple

from speccascade_jax.scheduling.scheduler import Result
from speccascade_jax.serving.protocol import UNFINISHED
from speccascade_jax.tokenizers.tokenizer import Tokenizer, text_of


class Piece(NamedTuple):
    """The text of one token: "" for the end of the sequence, and for incomplete bytes of a character."""

    text: str
    token: int
    origin: str
    level: int


class Pieces:
    """The text of one answer as it grows.

    Held back are the bytes of an unfinished character, and whatever may be the beginning of a stop text:
    the pieces of all calls together are the text of the whole.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]):
        self.tokenizer, self.stop = tokenizer, stop
        self.ends: list[int] = []  # where each token's text ends
        self.text = ""  # of all tokens but what is unfinished at its end
        self.solid = 0  # tokens up to the last one that ends with a whole character
        self.sent = 0  # tokens

    def of(self, result: Result, finished: bool) -> list[Piece]:
        """The pieces that have become certain: those of a whole number of tokens."""
        tokens = result.tokens
        for n in range(len(self.ends), len(tokens)):
            text = self.tokenizer.decode(tokens[: n + 1])
            if text.startswith(self.text) and not text.endswith(UNFINISHED):
                self.text, self.solid = text, n + 1
            self.ends.append(len(self.text))
        if finished:
            text = text_of(self.tokenizer, tokens, self.stop)
            ends = [min(end, len(text)) for end in self.ends]
            ends[-1:] = [len(text)] * bool(ends)  # what was held back is the last one's
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
    """The length of the longest end of `text` that some stop text begins with."""
    longest = max(map(len, stop), default=0)
    return next(
        (
            n
            for n in range(min(longest, len(text)), 0, -1)
            if any(sequence.startswith(text[len(text) - n :]) for sequence in stop)
        ),
        0,
    )
