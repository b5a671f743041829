"""Two tokenizers -> what a drafter of one vocabulary needs to draft for a verifier of another.

Tokens are matched by the text they stand for (" station", the byte 0xC3), the special ones by their role.
What is committed in target tokens is never tokenised anew, and the target's law is never cut.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from speccascade_jax.core.nests import each
from speccascade_jax.models import full_of
from speccascade_jax.models.decoder import DecoderConfig
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.tokenizers.tokenizer import Surface, Tokenizer, by_text, pad
from speccascade_jax.vocabularies.prefix_tree import strings
from speccascade_jax.vocabularies.translated import (
    NONE,
    Resized,
    Source,
    Tables,
    Translated,
    TranslatedParams,
    pruned,
)

LONGEST = 16  # own tokens of a target token: of a longer one the last so many are read


def matched(target: Sequence[Surface], own: Sequence[Surface]) -> Int[np.ndarray, "I 2"]:
    """The tokens that both vocabularies have: (own id, target id), ascending in the own ids, each id once.

    Tokens match where they stand for the same text, those of one kind first, those that are no text by their
    role. Of several that stand for the same text the lowest ids match.
    """
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    for key in (lambda one: one, lambda one: one.text or one):  # of one kind, then of any
        free: dict[Any, list[int]] = {}
        for token in range(len(own) - 1, -1, -1):
            if token not in pairs:
                free.setdefault(key(own[token]), []).append(token)
        for token, surface in enumerate(target):
            if token not in taken and free.get(key(surface)):
                pairs[free[key(surface)].pop()] = token
                taken.add(token)
    return np.array(sorted(pairs.items()), np.int32).reshape(-1, 2)


def spelled(text: bytes, ids: dict[bytes, int]) -> list[int] | None:
    """`text` in the fewest own tokens, whose texts `ids` numbers; None where it cannot be written."""
    longest = max(map(len, ids), default=0)
    best: list[list[int] | None] = [[]]
    for end in range(1, len(text) + 1):
        found = [[*before, ids[text[begin:end]]] for begin in range(max(end - longest, 0), end)
                 if (before := best[begin]) is not None and text[begin:end] in ids]
        best.append(min(found, key=lambda tokens: (len(tokens), tokens), default=None))
    return best[-1]


def spellings(target: Sequence[Surface], own: Sequence[Surface], tokenizer: Tokenizer,
              pairs: Int[np.ndarray, "I 2"]) -> list[list[int]]:
    """Each target token in own tokens: the same one where there is one, what the tokenizer makes of its text
    where that is this text, else the fewest that spell it; padding where nothing does."""
    same = {int(there): [int(here)] for here, there in pairs}
    ids, words = by_text(own), [n for n, one in enumerate(target) if n not in same and one.text[:1] == b" "]
    texts = [target[n].text.decode(errors="replace") for n in words]
    natural = dict(zip(words, tokenizer.encode_batch(texts), strict=True)) if words else {}
    found = []
    for token, surface in enumerate(target):
        tokens = same.get(token) or natural.get(token) or []
        if token not in same and b"".join(own[n].text for n in tokens) != surface.text:
            tokens = spelled(surface.text, ids) or []
        found.append(tokens[-LONGEST:] or [tokenizer.pad_id])
    return found


def cut_as(target: Tokenizer, own: Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to own tokens, cut as `target` cuts them: each of its tokens is spelled by
    itself, as `translated` has a drafter read what is committed."""
    theirs, ours = target.surfaces(), own.surfaces()
    table = spellings(theirs, ours, own, matched(theirs, ours))
    return lambda texts: [[token for one in row for token in table[one]]
                          for row in target.encode_batch(texts)]


def translated(model: Any, params: Any, own: Tokenizer, target: Tokenizer, rows: int, start_id: int | None, *,
               vocabulary: str = "tli", number: int = 0) -> tuple[Translated, TranslatedParams]:
    """The drafter over the verifier's vocabulary of `rows` logits, or with union over both together; its
    parameters with the tables. start_id, number: see Translated.

    Raises ValueError where the vocabularies have no text in common.
    """
    ours, theirs = own.surfaces(), target.surfaces()
    pairs = matched(theirs, ours)
    if not any(theirs[there].text for _, there in pairs):
        raise ValueError("the drafter's and the verifier's vocabularies have no token in common: take "
                         "another drafter.")
    head, cut, size = None, False, model.vocab_size
    if vocabulary in ("auto", "tli"):  # the others need all of the drafter's own law
        params, head, cut = pruned(model, params, pairs[:, 0])
    others = np.setdiff1d(np.arange(size), pairs[:, 0]) if vocabulary == "union" else np.zeros(0, np.int64)
    place = np.full(rows + len(others), NONE, np.int32)
    place[pairs[:, 1]] = np.arange(len(pairs)) if cut else pairs[:, 0]
    place[rows:] = others
    known = spellings(theirs, ours, own, pairs)
    ids = [*known, *[[own.pad_id]] * (rows - len(known)), *([int(n)] for n in others)]
    table, count = pad(ids, max(map(len, ids)), own.pad_id)
    usual = [len(tokens) for tokens, one in zip(known, theirs, strict=True) if one.kind == "piece"]
    stretch = max(float(np.mean(usual or [1])), 1.0)
    found = Translated(model, len(place), int(count.max()), stretch, start_id, number)
    tables, tree = Tables(*map(jnp.asarray, (place, table, count))), None
    if vocabulary == "slrs":
        if not hasattr(model, "extend_branches"):
            raise ValueError("slrs is for drafters by themselves, not for members of a "
                             "network: take vocabulary tli.")
        tree = jax.tree.map(jnp.asarray, strings(theirs, ours, rows, size))
    return found, TranslatedParams(params, head, tables, tree)


@dataclasses.dataclass
class Joined:
    """Models over one vocabulary."""

    models: list[Any]
    params: list[Any]
    foreign: dict[Translated, Tokenizer]  # those of another one, and what reads a text for them


def joined(loaded: Sequence[tuple[Any, Any, Tokenizer]], vocabulary: str) -> Joined:
    """Each (model, parameters, tokenizer), the largest last, over the largest one's vocabulary.

    Models of its tokenizer stay as they are; where their logits are padded to another number of rows, what is
    past the tokenizer gets no mass; of decoder-only models never. Raises ValueError for vocabularies that
    `vocabulary` cannot join.
    """
    *smaller, (verifier, largest, target) = loaded
    pieces = target.pieces()
    foreign = [n for n, (_, _, own) in enumerate(smaller) if own.pieces() != pieces]
    if vocabulary in ("union", "slrs") and foreign not in ([], [0]):
        raise ValueError(f"only the smallest model may have another vocabulary with {vocabulary}: take tli.")
    if vocabulary == "slem" and foreign and len(loaded) > 2:
        raise ValueError(f"slem is made of two models, not of {len(loaded)}: take tli.")
    full, found = full_of(verifier.config), Joined([], [], {})
    # A decoder-only model goes on with its prompt.
    start = None if isinstance(full, DecoderConfig) else getattr(full, "start_id", full.pad_id)
    for n, (model, params, own) in enumerate(smaller):
        if n in foreign:
            model, params = translated(model, params, own, target, verifier.vocab_size, start, number=n,
                                       vocabulary=vocabulary)
            found.foreign[model] = own
        found.models.append(model)
        found.params.append(params)
    size = max(model.vocab_size for model in [*found.foreign, verifier])
    found.models = [model if n in foreign else resized(model, size, min(target.size, verifier.vocab_size))
                    for n, model in enumerate(found.models)]
    whole = isinstance(full_of(verifier.config), T5Config)  # its texts may hold sentinels
    found.models.append(resized(verifier, size, size if whole else target.size))
    found.params.append(largest)
    return found


def resized(model: Any, size: int, known: int) -> Any:
    """The model over `size` tokens, of which it writes the first `known` only.

    Of a model that has so many rows itself,
    those past its tokenizer are padding where it only decodes (T5 has
    sentinels there); members of a network are left as they are.
    """
    pads = isinstance(full_of(model.config), DecoderConfig) and not hasattr(model, "member_of")
    known = min(known, model.vocab_size)
    return model if model.vocab_size == size and not (pads and known < size) else Resized(model, size, known)


def readings(foreign: dict[Translated, Tokenizer], texts: Sequence[str], width: int,
             asked: Callable[[Sequence[str], Tokenizer], Sequence[str]] = lambda texts, own: texts
             ) -> list[dict[Translated, list[int]]]:
    """Each text as every foreign model reads it, cut to what stands for `width` target tokens; asked(texts,
    tokenizer): what a model of that tokenizer is shown for them."""
    rows = {model: [own.framed(row, model.reads(width)) for row in own.encode_batch(list(asked(texts, own)))]
            for model, own in foreign.items()}
    return [{model: row[n] for model, row in rows.items()} for n in range(len(texts))]


def inputs_of(models: Any, tokens: Any, own: Sequence[dict[Translated, list[int]]]) -> Any:
    """What each model of a nest reads: `tokens` [B, S] of the target, or a Source with the `own` tokens of
    each row; one array for all where they read the same."""
    def one(model: Any) -> Any:
        if not isinstance(model, Translated):
            return tokens
        return Source(tokens, *pad([row.get(model, []) for row in own], model.reads(tokens.shape[1]), 0))

    return each(one, models) if has_foreign(models) else tokens


def shapes_of(models: Any, tokens: Any, array: Any) -> Any:
    """The shapes of inputs_of(); array(size) is that of [B, size] int32, array() of [B]."""
    def one(model: Any) -> Any:
        if not isinstance(model, Translated):
            return tokens
        return Source(tokens, array(model.reads(tokens.shape[1])), array())

    return each(one, models) if has_foreign(models) else tokens


def has_foreign(models: Any) -> bool:
    if type(models) is tuple:
        return any(map(has_foreign, models))
    return isinstance(models, Translated)
