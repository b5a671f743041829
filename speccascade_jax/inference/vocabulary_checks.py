"""Which methods models of unequal vocabularies can follow."""

from collections.abc import Iterable
from pathlib import Path

from speccascade_jax import checkpoints
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.rules import TRAINED
from speccascade_jax.settings import NAMED, Settings, named, resolved
from speccascade_jax.tokenizers.tokenizer import Tokenizer
from speccascade_jax.vocabularies import VOCABULARIES, Strategy


def check_method(settings: Settings, levels: int, strategy: Strategy) -> None:
    """Raises FieldError for a method that models cannot follow whose vocabularies are joined like this."""
    scheme = settings.scheme(levels)
    strategy.check(settings.name, () if scheme else settings.rules(levels), scheme, settings.adaptive)


def check_methods(run: DecodeConfig, points: Iterable[Settings]) -> None:
    """check_method for each of `points`, by the tokenizers alone, before the models are read. What is missing
    here or read from a file is left to the loading.

    Raises FieldError as check_method does.
    """
    paths = [path for _, path in run.roles]
    if run.tokenizer or not all(Path(checkpoints.split_member(path)[0]).is_dir() for path in paths):
        return
    *others, target = (Tokenizer(checkpoints.tokenizer_file(path)).pieces() for path in paths)
    if all(pieces == target for pieces in others):
        return
    samplers = named(run.samplers)
    for point in points:
        point.check(len(target), len(others), {**NAMED, **samplers})
        if point.name not in TRAINED:
            check_method(resolved(point, samplers), len(others), VOCABULARIES[run.vocabulary])
