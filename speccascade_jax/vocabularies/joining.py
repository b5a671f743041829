"""Joins models with different tokenizers into models over one vocabulary, the largest model's."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.nests import each
from speccascade_jax.models import DecoderOnlyConfig, full_of, start_of
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.tokenizers.tokenizer import Tokenizer, pad
from speccascade_jax.vocabularies.matching import matched, spellings
from speccascade_jax.vocabularies.strategy import Strategy
from speccascade_jax.vocabularies.tli import TLI
from speccascade_jax.vocabularies.translated import (
    NONE,
    Resized,
    Source,
    Tables,
    Translated,
    TranslatedParams,
)


def translated(
    model: Any,
    params: Any,
    drafter_tokenizer: Tokenizer,
    target: Tokenizer,
    rows: int,
    start_id: int | None,
    *,
    strategy: Strategy = TLI,
    number: int = 0,
) -> tuple[Translated, TranslatedParams]:
    """Returns the drafter over the verifier's vocabulary of `rows` logits, or over the union if the strategy
    adds `others`, and its parameters with the tables. start_id, number: see Translated.

    Raises ValueError if the vocabularies have no text in common.
    """
    ours, theirs = drafter_tokenizer.surfaces(), target.surfaces()
    pairs = matched(theirs, ours)
    if not any(theirs[there].text for _, there in pairs):
        raise ValueError(
            "the drafter's and the verifier's vocabularies have no token in common: use another drafter."
        )
    size = model.vocab_size
    others = strategy.others(size, pairs)
    params, head, cut = strategy.head(model, params, pairs[:, 0])
    place = np.full(rows + len(others), NONE, np.int32)
    place[pairs[:, 1]] = np.arange(len(pairs)) if cut else pairs[:, 0]
    place[rows:] = others
    known = spellings(theirs, ours, drafter_tokenizer, pairs)
    ids = [*known, *[[drafter_tokenizer.pad_id]] * (rows - len(known)), *([int(n)] for n in others)]
    table, count = pad(ids, max(map(len, ids)), drafter_tokenizer.pad_id)
    usual = [len(tokens) for tokens, surface in zip(known, theirs, strict=True) if surface.kind == "piece"]
    stretch = max(float(np.mean(usual or [1])), 1.0)
    drafter = Translated(model, len(place), int(count.max()), stretch, start_id, number)
    tables = Tables(*map(jnp.asarray, (place, table, count)))
    tree = strategy.tree(model, theirs, ours, rows, size) if strategy.tree else None
    return drafter, TranslatedParams(params, head, tables, tree)


@dataclasses.dataclass
class Joined:
    """Models over one vocabulary."""

    models: list[Any]
    params: list[Any]
    foreign: dict[Translated, Tokenizer]  # models with another vocabulary, and their tokenizers


def joined(loaded: Sequence[tuple[Any, Any, Tokenizer]], strategy: Strategy) -> Joined:
    """Joins (model, parameters, tokenizer) triples, the largest model last, over its vocabulary.

    Models with that tokenizer are not changed, except that logits of padded vocabularies are brought to one
    size: rows past the tokenizer get no mass. In decoder-only models they never do. Raises ValueError for
    vocabularies that `strategy` cannot join.
    """
    *smaller, (verifier, largest, target) = loaded
    pieces = target.pieces()
    foreign = [n for n, (_, _, tokenizer) in enumerate(smaller) if tokenizer.pieces() != pieces]
    if strategy.smallest_only and foreign not in ([], [0]):
        raise FieldError(
            "vocabulary",
            strategy.name,
            "use tli.",
            f"only the smallest model may have another vocabulary with {strategy.name}",
        )
    if strategy.max_models is not None and foreign and len(loaded) > strategy.max_models:
        raise FieldError(
            "vocabulary",
            strategy.name,
            "use tli.",
            f"{strategy.name} joins {strategy.max_models} models, not {len(loaded)}",
        )
    result, start = Joined([], [], {}), start_of(verifier.config)
    for n, (model, params, tokenizer) in enumerate(smaller):
        if n in foreign:
            model, params = translated(
                model, params, tokenizer, target, verifier.vocab_size, start, number=n, strategy=strategy
            )
            result.foreign[model] = tokenizer
        result.models.append(model)
        result.params.append(params)
    size = max(model.vocab_size for model in [*result.foreign, verifier])
    result.models = [
        model if n in foreign else resized(model, size, min(target.size, verifier.vocab_size))
        for n, model in enumerate(result.models)
    ]
    whole = isinstance(full_of(verifier.config), T5Config)  # its texts may hold sentinels
    result.models.append(resized(verifier, size, size if whole else target.size))
    result.params.append(largest)
    return result


def resized(model: Any, size: int, known: int) -> Any:
    """Wraps a model so that it has `size` logits and writes only the first `known` tokens.

    A model that has `size` logits is wrapped only if it is decoder-only and has padding past its tokenizer
    (T5 has sentinels there), and never if it is a member of a network.
    """
    pads = isinstance(full_of(model.config), DecoderOnlyConfig) and not hasattr(model, "member_of")
    known = min(known, model.vocab_size)
    return model if model.vocab_size == size and not (pads and known < size) else Resized(model, size, known)


def readings(
    foreign: dict[Translated, Tokenizer],
    texts: Sequence[str],
    width: int,
    shown: Callable[[Sequence[str], Tokenizer], Sequence[str]] = lambda texts, tokenizer: texts,
) -> list[dict[Translated, list[int]]]:
    """Each text in the tokens of every foreign model, truncated to the equivalent of `width` target tokens.
    shown(texts, tokenizer) gives the texts as a model with that tokenizer reads them."""
    rows = {
        model: [
            tokenizer.framed(row, model.reads(width))
            for row in tokenizer.encode_batch(list(shown(texts, tokenizer)))
        ]
        for model, tokenizer in foreign.items()
    }
    return [{model: row[n] for model, row in rows.items()} for n in range(len(texts))]


def inputs_of(models: Any, tokens: Any, foreign_tokens: Sequence[dict[Translated, list[int]]]) -> Any:
    """The inputs of each model of a nest: `tokens` [B, S] in the target vocabulary, or a Source with each
    row's `foreign_tokens`. One array if all models read the same tokens."""

    def input_of(model: Any) -> Any:
        if not isinstance(model, Translated):
            return tokens
        return Source(
            tokens, *pad([row.get(model, []) for row in foreign_tokens], model.reads(tokens.shape[1]), 0)
        )

    return each(input_of, models) if has_foreign(models) else tokens


def shapes_of(models: Any, tokens: Any, array: Any) -> Any:
    """The shapes of inputs_of(). array(size) returns the shape of an int32 [B, size], and array() that of
    [B]."""

    def shape_of(model: Any) -> Any:
        if not isinstance(model, Translated):
            return tokens
        return Source(tokens, array(model.reads(tokens.shape[1])), array())

    return each(shape_of, models) if has_foreign(models) else tokens


def has_foreign(models: Any) -> bool:
    if type(models) is tuple:
        return any(map(has_foreign, models))
    return isinstance(models, Translated)
