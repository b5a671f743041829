"""Pieces join to the whole text, however the tokens arrive."""

import itertools

import numpy as np
import pytest

from speccascade_jax.scheduling.scheduler import Result
from speccascade_jax.serving.pieces import Pieces, held_back
from speccascade_jax.tokenizers.tokenizer import Tokenizer, up_to_stop


@pytest.fixture(scope="module")
def tokenizer(spiece):
    return Tokenizer(spiece)


def result(tokens):
    return Result(tokens, ["draft"] * len(tokens), [0] * len(tokens), {})


def joined(tokenizer, tokens, stop, cuts):
    """The pieces of tokens that come in parts, as the scheduler hands them out."""
    pieces, parts = Pieces(tokenizer, stop), []
    for n in cuts:
        stopped = up_to_stop(tokenizer, tokens[:n], stop, goes_on=n < len(tokens))
        if stopped:
            return parts + pieces.of(result(stopped[0]), True), stopped[1]
        parts += pieces.of(result(tokens[:n]), False)
        assert tokenizer.decode(tokens).startswith("".join(piece.text for piece in parts))
    stopped = up_to_stop(tokenizer, tokens, stop)
    kept = stopped[0] if stopped else tokens
    return parts + pieces.of(result(kept), True), stopped[1] if stopped else tokenizer.decode(tokens)


@pytest.mark.parametrize(
    "stop",
    [
        (),
        ("at",),
        ("the mat", "e c"),
        ("🦜",),
        ("t", "t on the"),
        ("\ufffd",),
        ("e\ufffd", "cat sat", "at s"),
    ],
)
def test_pieces_join_to_the_whole(tokenizer, stop):
    draw = np.random.default_rng(0)
    texts = ["the cat sat on the mat", "birds 🦜🦜 sing é in", "naïve façade 🏳️‍🌈 why not"]
    rows = [tokenizer.encode_batch([text])[0] + [tokenizer.eos_id] for text in texts]
    rows += [draw.integers(3, 260, 30).tolist() for _ in range(40)]  # half of them bytes, in no order
    held = 0
    for tokens in rows:
        cuts = sorted(draw.integers(1, len(tokens) + 1, 6).tolist())
        pieces, text = joined(tokenizer, tokens, stop, cuts)
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.token for piece in pieces] == tokens[: len(pieces)]
        once, same = joined(tokenizer, tokens, stop, [])
        held += pieces != once
        assert same == text
    assert held < len(rows) // 2  # a token's own piece seldom depends on when it came


def test_only_what_may_begin_a_stop_text_is_held_back():
    for text, stop, size in (
        ("abc", ("cd",), 1),
        ("abc", ("abcd", "cx"), 3),
        ("abc", ("x",), 0),
        ("", ("x",), 0),
        ("aab", ("abab",), 2),
        ("abc", (), 0),
        ("aaa", ("aaaa",), 3),
    ):
        assert held_back(text, stop) == size
        assert not any(
            text[n:] and stop_text.startswith(text[n:])
            for stop_text, n in itertools.product(stop, range(len(text) - size))
        )
