"""Reads task files into examples and token batches. A batch is a pure function of (seed, step)."""

import copy
import dataclasses
import itertools
import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from speccascade_jax.checkpoints.arrays import reason
from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.protocols import AnyArray
from speccascade_jax.inference.inputs import check_text, parse_json, read_lines
from speccascade_jax.tokenizers.tokenizer import Tokenizer, pad
from speccascade_jax.training import word_problems

Encode = Callable[[list[str]], list[list[int]]]
"""A function from texts to their token ids."""


class Batch(NamedTuple):
    """Padded token ids; `target` ends with the end-of-sequence token."""

    source: AnyArray  # [B, S]
    source_length: AnyArray  # [B]
    target: AnyArray  # [B, T]
    target_length: AnyArray  # [B]


def read_examples(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yields the examples of a split as dicts.

    path: a .jsonl (one object per line), a .tsv (no header; `source` TAB `target`), either gzipped;
    hf://ORGANISATION/NAME[/CONFIG]:SPLIT or tfds://NAME[/CONFIG]:SPLIT where that library is installed;
    made://word_problems?QUERY, made from a seed (training.word_problems).
    Raises ValueError with the line's number.
    """
    scheme, _, name = str(path).partition("://")
    if scheme in SCHEMES and name:
        yield from SCHEMES[scheme].read(name)
        return
    tabs = str(path).removesuffix(".gz").endswith(".tsv")
    for number, line in enumerate(read_lines(path), 1):
        if tabs:
            columns = line.split("\t")
            if len(columns) != 2:
                raise ValueError(
                    f"{path}, line {number}: {len(columns)} columns; a .tsv has two, source and "
                    "target, with one tab between them."
                )
            yield dict(zip(("source", "target"), columns, strict=True))
            continue
        where = f"{path}, line {number}"
        example = parse_json(line, where)
        if not isinstance(example, dict):
            raise ValueError(
                f"{where} is {reprlib.repr(example)}; a line of a .jsonl is an object, such as "
                '{"source": "a text", "target": "its translation"}.'
            )
        yield example


def _name_and_split(name: str) -> tuple[str, str]:
    name, _, split = name.partition(":")
    if not split:
        raise ValueError(f"{name} names no split: write NAME:SPLIT, such as wmt/wmt14/de-en:train.")
    return name, split


def _from_hugging_face(name: str) -> Iterator[dict[str, Any]]:
    """hf://abisee/cnn_dailymail/3.0.0:train: an organisation, a dataset, its configuration."""
    try:
        import datasets
    except ImportError:
        raise ValueError(f"to read hf://{name}: pip install datasets; or give a .jsonl file.") from None
    name, split = _name_and_split(name)
    parts = name.split("/")
    if len(parts) not in (2, 3):
        raise ValueError(
            f"hf://{name} is no dataset's name: write ORGANISATION/NAME or ORGANISATION/NAME/CONFIG."
        )
    try:
        examples = datasets.load_dataset("/".join(parts[:2]), *parts[2:], split=split)
    except Exception as error:  # the library raises many types, from DNS errors to unknown splits
        raise ValueError(
            f"cannot read hf://{name}:{split} ({reason(error)}); give a .jsonl file instead."
        ) from None
    yield from examples


def _from_tfds(name: str) -> Iterator[dict[str, Any]]:
    try:
        import tensorflow_datasets
    except ImportError:
        raise ValueError(
            f"to read tfds://{name}: pip install tensorflow-datasets; or give a .jsonl file."
        ) from None
    name, split = _name_and_split(name)
    try:
        examples = tensorflow_datasets.as_numpy(tensorflow_datasets.load(name, split=split))
    except Exception as error:  # many types, as above
        raise ValueError(
            f"cannot read tfds://{name}:{split} ({reason(error)}); give a .jsonl file instead."
        ) from None
    for example in examples:
        yield {key: value.decode() if isinstance(value, bytes) else value for key, value in example.items()}


class Source(NamedTuple):
    """The reader for a scheme, and the library that it needs."""

    read: Callable[[str], Iterator[dict[str, Any]]]
    module: str | None = None
    package: str | None = None


SCHEMES = {
    "hf": Source(_from_hugging_face, "datasets", "datasets"),
    "tfds": Source(_from_tfds, "tensorflow_datasets", "tensorflow-datasets"),
    "made": Source(word_problems.read),
}
"""The sources by scheme: the part of a split's name before ://."""


def lookup(example: dict[str, Any], name: str) -> Any:
    """The value of `name`, which is a field or a dotted path (translation.en); None if it is missing."""
    value: Any = example
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def field(example: dict[str, Any], name: str, where: str) -> str:
    """The text of field `name`. Raises FieldError if there is none."""
    value = lookup(example, name)
    if value is None:
        raise FieldError(
            name,
            value,
            "name the task's fields in its config.",
            f"{where}: no text in field {name!r} (fields: {', '.join(map(str, example))})",
        )
    return check_text(value, f"{where}: {name!r}")


def references_of(example: dict[str, Any], name: str, where: str) -> list[str]:
    """The texts listed in field `name`; [] if it is missing. Raises FieldError if it is not a list of
    texts."""
    if name not in example:
        return []
    references = example[name]
    if not isinstance(references, list):
        raise FieldError(
            name,
            references,
            "it must be a list of texts.",
            f"{where}: {name!r} is {reprlib.repr(references)}",
        )
    return [check_text(text, f"{where}: {name!r}") for text in references]


def texts(task: Task, path: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yields (source, target, references) of every example of a split. A missing target is replaced by the
    first reference, and missing references by the target.

    Raises ValueError for a field that is missing or not text, with its line number, and for an empty split.
    """
    number = 0
    for number, example in enumerate(read_examples(path), 1):
        where = f"{path}, line {number}"
        references = references_of(example, task.references_field, where)
        target = (
            references[0]
            if references and task.target_field not in example
            else field(example, task.target_field, where)
        )
        yield field(example, task.source_field, where), target, references or [target]
    if not number:
        raise ValueError(f"{path} holds no examples: give another split.")


def joined_examples(task: Task, path: str, seed: int = 0) -> list[tuple[str, list[str]]]:
    """(source, references) pairs, each joined from 1 .. task.join examples of a split.

    The r-th reference joins the r-th references of the parts (the last one of a part that has fewer).
    """
    if task.join < 1:
        raise FieldError("join", task.join, "it must be at least 1.")
    examples = list(texts(task, path))
    order, starts = _groups(len(examples), task.join, np.random.default_rng([seed, 1]))
    joined = []
    for begin, end in itertools.pairwise(starts):
        parts = [examples[i] for i in order[begin:end]]
        count = max(len(references) for _, _, references in parts)
        joined.append(
            (
                " ".join(source for source, _, _ in parts),
                [" ".join(r[min(n, len(r) - 1)] for _, _, r in parts) for n in range(count)],
            )
        )
    return joined


def _groups(count: int, join: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A random order of `count` examples, and the borders of groups of 1 .. `join` in it."""
    order = rng.permutation(count)
    borders = np.concatenate([[0], np.cumsum(rng.integers(1, join + 1, count))])
    return order, np.append(borders[borders < count], count)


class TokenTable(NamedTuple):
    """Rows of token ids in one array, which takes a fraction of the memory of lists."""

    tokens: np.ndarray  # [sum of lengths]
    borders: np.ndarray  # [rows + 1]

    def row(self, n: int) -> np.ndarray:
        return self.tokens[self.borders[n] : self.borders[n + 1]]

    @classmethod
    def of(cls, rows: list[list[int]]) -> "TokenTable":
        return cls(
            np.fromiter(itertools.chain.from_iterable(rows), np.int32), np.cumsum([0, *map(len, rows)])
        )

    @classmethod
    def joined(cls, tables: list["TokenTable"]) -> "TokenTable":
        lengths = np.concatenate([[0], *(np.diff(t.borders) for t in tables)]).astype(np.int64)
        return cls(np.concatenate([np.zeros(0, np.int32), *(t.tokens for t in tables)]), np.cumsum(lengths))


@dataclasses.dataclass
class TrainingBatches:
    """Training batches in length buckets. Batch `step` depends only on (seed, step).

    Every epoch shuffles the examples, joins groups of 1 .. task.join of them, sorts the results into
    `buckets` shapes (fractions of the task's limits), and splits each shape into batches of about
    `batch_tokens` positions (of the longer side) and a multiple of `rows` rows. With `epochs`, later epochs
    repeat the batches of the first ones.
    """

    task: Task
    tokenizer: Tokenizer
    batch_tokens: int
    seed: int
    rows: int = 8
    buckets: int = 8
    cut: Encode | None = None  # tokenizes the targets in place of the tokenizer
    epochs: int | None = None

    def __post_init__(self) -> None:
        examples = texts(self.task, self.task.train)
        sources, targets, cut = [], [], self.cut or self.tokenizer.encode_batch
        while chunk := list(itertools.islice(examples, 10_000)):  # text is discarded once encoded
            sources.append(
                TokenTable.of(
                    self.tokenizer.encode_batch(
                        [self.task.prefix + source + self.task.suffix for source, _, _ in chunk]
                    )
                )
            )
            targets.append(TokenTable.of(cut([target for _, target, _ in chunk])))
        self.sources, self.targets = TokenTable.joined(sources), TokenTable.joined(targets)
        self.lengths = np.stack([np.diff(self.sources.borders), np.diff(self.targets.borders)], axis=1)

    def reshuffled(self, seed: int) -> "TrainingBatches":
        """The same examples with another seed."""
        other = copy.copy(self)
        other.seed = seed
        return other

    def _epoch(self, epoch: int) -> list[tuple[np.ndarray, list[np.ndarray]]]:
        """An epoch's batches: (padded source and target length, groups of example indices)."""
        rng = np.random.default_rng([self.seed, epoch])
        order, borders = _groups(len(self.lengths), self.task.join, rng)
        sums = np.concatenate([[[0, 0]], np.cumsum(self.lengths[order], axis=0)])
        lengths = sums[borders[1:]] - sums[borders[:-1]] + 1  # + 1: begin or end of sequence
        limit = np.array([self.task.max_source_length, self.task.max_target_length])
        sizes = -(-limit * np.arange(1, self.buckets + 1)[:, None] // self.buckets)
        fits = (lengths[:, None] <= sizes).all(axis=2)  # [examples, buckets]
        smallest = np.where(fits.any(axis=1), fits.argmax(axis=1), self.buckets)
        batches = []
        for n, size in enumerate(sizes):
            members = np.flatnonzero(smallest == n)
            rows = max(self.rows, self.batch_tokens // int(size.max()) // self.rows * self.rows)
            for begin in range(0, len(members) - rows + 1, rows):
                chosen = members[begin : begin + rows]
                batches.append((size, [order[borders[g] : borders[g + 1]] for g in chosen]))
        return [batches[i] for i in rng.permutation(len(batches))]

    def shapes(self) -> list[Batch]:
        """The shapes of every batch of the first `epochs` epochs."""

        def shape(*size: int) -> Any:
            return jax.ShapeDtypeStruct(size, np.int32)

        epochs = [self._epoch(epoch) for epoch in range(self.epochs or 0)]
        return [
            Batch(shape(len(rows), source), shape(len(rows)), shape(len(rows), target), shape(len(rows)))
            for (source, target), rows in itertools.chain.from_iterable(epochs)
        ]

    def from_step(self, step: int) -> Iterator[Batch]:
        """Yields the batches of steps `step`, `step` + 1, ... endlessly."""
        epoch = 0
        while True:
            batches = self._epoch(epoch % self.epochs if self.epochs else epoch)
            if not batches:
                raise ValueError(
                    f"{self.task.train} has too few examples of at most "
                    f"{self.task.max_source_length}/{self.task.max_target_length} tokens "
                    "for one batch: lower batch_tokens or raise the limits."
                )
            for size, groups in batches[step:]:
                yield self._batch(size, groups)
            step = max(0, step - len(batches))
            epoch += 1

    def _batch(self, size: np.ndarray, groups: list[np.ndarray]) -> Batch:
        def join(table: TokenTable, group: np.ndarray) -> list[int]:
            return np.concatenate([table.row(i) for i in group]).tolist()

        sources = [self.tokenizer.framed(join(self.sources, g)) for g in groups]
        targets = [[*join(self.targets, g), self.tokenizer.eos_id] for g in groups]
        return Batch(
            *pad(sources, int(size[0]), self.tokenizer.pad_id),
            *pad(targets, int(size[1]), self.tokenizer.pad_id),
        )


def validation_batches(
    config: TrainConfig, tokenizer: Tokenizer, rows: int, cut: Encode | None = None
) -> list[Batch]:
    """The validation split, joined as in training and padded to the task's limits, `rows` rows per batch.
    cut: as in TrainingBatches."""
    task = config.task
    examples = joined_examples(task, task.validation)
    sources = tokenizer.encode_batch([task.prefix + source + task.suffix for source, _ in examples])
    targets = (cut or tokenizer.encode_batch)([references[0] for _, references in examples])
    pairs = [
        (tokenizer.framed(s), [*t, tokenizer.eos_id])
        for s, t in zip(sources, targets, strict=True)
        if len(s) < task.max_source_length and len(t) < task.max_target_length
    ]
    if not pairs:
        raise ValueError(
            f"{task.validation} has no example within {task.max_source_length}/"
            f"{task.max_target_length} tokens: raise the limits or give another split."
        )
    pairs += [([], [])] * (-len(pairs) % rows)  # empty rows have no tokens to count
    batches = []
    for begin in range(0, len(pairs), rows):
        source, target = zip(*pairs[begin : begin + rows], strict=True)
        batches.append(
            Batch(
                *pad(source, task.max_source_length, tokenizer.pad_id),
                *pad(target, task.max_target_length, tokenizer.pad_id),
            )
        )
    return batches
