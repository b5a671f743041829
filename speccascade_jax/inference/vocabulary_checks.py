"""Checks methods for drafters with another vocabulary or without a distribution."""

from collections.abc import Iterable
from pathlib import Path

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import tokenizer_files
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.rules import TRAINED
from speccascade_jax.core.samplers.lookup import ModelFree, split_drafter
from speccascade_jax.settings import NAMED, Settings, named, resolved
from speccascade_jax.tokenizers.tokenizer import Tokenizer
from speccascade_jax.vocabularies import Strategy, strategy_of
from speccascade_jax.vocabularies.strategy import UNSTATED, refused_without_law


def check_method(settings: Settings, levels: int, strategy: Strategy) -> None:
    """Raises FieldError for a method that cannot be used with vocabularies joined by `strategy`."""
    scheme = settings.scheme(levels)
    strategy.check(settings.name, () if scheme else settings.rules(levels), scheme, settings.adaptive)


def check_drafts(settings: Settings, levels: int, drafter: ModelFree) -> None:
    """Raises FieldError for settings that cannot be used with drafts without a model."""
    name, scheme = drafter.name, settings.scheme(levels)
    if settings.adaptive:
        raise FieldError(
            "block_size",
            settings.block_size,
            "give a number: the most tokens of a draft.",
            f"block_size is {settings.block_size!r}, and {name} decides by itself how many tokens it drafts",
        )
    if scheme is not None and scheme.models is None:
        return
    method = UNSTATED if scheme else settings.rules(levels)[0]
    if refused := refused_without_law(name, settings.name, method):
        problem, remedy = refused
        raise FieldError("method", settings.name, remedy, problem)


def check_methods(run: DecodeConfig, points: Iterable[Settings]) -> None:
    """Applies check_method and check_drafts to each of `points`, using only the tokenizers, before the models
    are read. Missing checkpoints are left to the loader.

    Raises FieldError like these.
    """
    samplers, model_free = named(run.samplers), split_drafter(run.roles[0][1])[0]
    if model_free is not None:
        for point in points:
            levels = len(run.roles) - 1
            point.check(levels=levels, known={**NAMED, **samplers})
            if point.name not in TRAINED:
                check_drafts(resolved(point, samplers), levels, model_free)
        return
    folders = [Path(checkpoints.split_member(path)[0]) for _, path in run.roles]
    if run.tokenizer or not all(folder.is_dir() for folder in folders):
        return
    files = [file for file in map(tokenizer_files.find, folders) if file is not None]
    if len(files) < len(folders):  # assistants and heads need no tokenizer
        return
    *others, target = (Tokenizer(file).pieces() for file in files)
    if all(pieces == target for pieces in others):
        return
    for point in points:
        point.check(len(target), len(others), {**NAMED, **samplers})
        if point.name not in TRAINED:
            check_method(resolved(point, samplers), len(others), strategy_of(run.vocabulary))
