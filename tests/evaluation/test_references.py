"""Texts with different numbers of references."""

import pytest

from speccascade_jax.evaluation.quality import bleu, score, statistics


def test_a_missing_reference_is_none_and_not_an_empty_one():
    """An empty reference would be the one of the nearest length for a short text, and lift its BLEU."""
    texts = ["ja", "das ist ein kleines Haus am See"]
    references = [["ja , das ist wahr"], ["das ist ein kleines Haus am See", "ein Haus an einem See"]]
    by_example = score("bleu", statistics("bleu", texts, references).sum(axis=0))
    assert bleu(texts, references) == pytest.approx(by_example, abs=1e-9)
