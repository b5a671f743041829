"""Which methods models of unequal vocabularies can follow."""

from collections.abc import Iterable
from pathlib import Path

from speccascade_jax import checkpoints
from speccascade_jax.baselines import BASELINES
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.methods import SINGLE_MODEL, TRAINED
from speccascade_jax.core.samplers.proposals import NEEDS_NO_DRAFTER
from speccascade_jax.settings import Settings, Vocabulary
from speccascade_jax.tokenizers.tokenizer import Tokenizer


def check_method(settings: Settings, levels: int, vocabulary: Vocabulary) -> None:
    """Raises ValueError for a method that models cannot follow whose vocabularies are joined like this."""
    if vocabulary == "slem" and settings.name not in (*SINGLE_MODEL, *NEEDS_NO_DRAFTER):
        raise ValueError(f"{settings.name} needs the drafter's distribution, which slem has not: take "
                         f"vocabulary tli, or one of {', '.join(NEEDS_NO_DRAFTER)}.")
    if vocabulary == "slem" and settings.adaptive:
        raise ValueError("block_size is 'adaptive', which slem's drafts are not: give a number, or take "
                         "vocabulary tli.")
    if vocabulary != "union" or settings.name in SINGLE_MODEL:
        return
    rule = None if settings.name in BASELINES else settings.rules(levels)[0]
    if rule is None or not rule.lossless:
        raise ValueError(f"{settings.name} would write tokens that only the drafter has: take vocabulary "
                         "tli, or speculative at the lowest level.")


def check_methods(run: DecodeConfig, points: Iterable[Settings]) -> None:
    """check_method for each of `points`, by the tokenizers alone, before the models are read. What is missing
    here or read from a file is left to the loading.

    Raises ValueError as check_method does.
    """
    paths = [path for _, path in run.roles]
    if run.vocabulary not in ("slem", "union") or run.tokenizer or not all(
            Path(checkpoints.split_member(path)[0]).is_dir() for path in paths):
        return
    *others, target = (Tokenizer(checkpoints.tokenizer_file(path)).pieces() for path in paths)
    if all(own == target for own in others):
        return
    for point in points:
        point.check(len(target), len(others))
        if point.name not in TRAINED:
            check_method(point, len(others), run.vocabulary)
