"""Task files -> examples -> token batches, a pure function of (seed, step)."""

import dataclasses
import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from speccascade_jax.config import Task
from speccascade_jax.text import Tokenizer, pad


class Batch(NamedTuple):
    """Padded token ids; `target` ends with the end-of-sequence token."""

    source: np.ndarray         # [B, S]
    source_length: np.ndarray  # [B]
    target: np.ndarray         # [B, T]
    target_length: np.ndarray  # [B]


def read_lines(path: str | Path, data: bytes | None = None) -> list[str]:
    """The lines of a text file, gzipped or not, or of `data` that came from `path`.

    Raises ValueError with file and line on bad UTF-8.
    """
    try:
        data = Path(path).read_bytes() if data is None else data
        data = gzip.decompress(data) if str(path).endswith(".gz") else data
    except (OSError, EOFError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    lines = data.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    decoded = []
    for number, line in enumerate(lines, 1):
        try:
            decoded.append(line.decode("utf-8").rstrip("\r"))
        except UnicodeDecodeError:
            raise ValueError(f"{path}, line {number}: not valid UTF-8; convert the file first "
                             "(iconv -f latin1 -t utf-8).") from None
    return decoded


def read_examples(path: str | Path) -> list[dict[str, Any]]:
    """One dict a line of a .jsonl or .jsonl.gz file."""
    examples = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            examples.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}).") from None
    return examples


def joined_examples(task: Task, path: str, seed: int = 0) -> list[tuple[str, list[str]]]:
    """(source, references) of a split, with one to task.join examples joined into each.

    The r-th reference joins the r-th reference of each part (its last one where it has fewer).
    """
    examples = read_examples(path)
    order, starts = _groups(len(examples), task.join, np.random.default_rng([seed, 1]))
    joined = []
    for begin, end in itertools.pairwise(starts):
        parts = [examples[i] for i in order[begin:end]]
        references = [p.get(task.references_field) or [p[task.target_field]] for p in parts]
        count = max(len(r) for r in references)
        joined.append((" ".join(p[task.source_field] for p in parts),
                       [" ".join(r[min(n, len(r) - 1)] for r in references) for n in range(count)]))
    return joined


def _groups(count: int, join: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A random order of `count` examples and the borders of groups of one to `join` in it."""
    order = rng.permutation(count)
    borders = np.concatenate([[0], np.cumsum(rng.integers(1, join + 1, count))])
    return order, np.append(borders[borders < count], count)


@dataclasses.dataclass
class TrainingBatches:
    """Training batches by length bucket; batch `step` depends on (seed, step) alone.

    Every epoch shuffles the examples, joins one to task.join of them, sorts the results into
    buckets of padded length, and cuts these into batches of about `batch_tokens` positions.
    """

    task: Task
    tokenizer: Tokenizer
    batch_tokens: int
    seed: int
    bucket: int = 8

    def __post_init__(self) -> None:
        examples = read_examples(self.task.train)
        self.sources = self.tokenizer.encode_batch(
            [self.task.prefix + e[self.task.source_field] for e in examples])
        self.targets = self.tokenizer.encode_batch([e[self.task.target_field] for e in examples])
        self.lengths = np.array([[len(s), len(t)] for s, t in zip(self.sources, self.targets, strict=True)])

    def _epoch(self, epoch: int) -> list[tuple[int, list[np.ndarray]]]:
        """The epoch's batches: (padded length, groups of example numbers)."""
        rng = np.random.default_rng([self.seed, epoch])
        order, borders = _groups(len(self.sources), self.task.join, rng)
        sums = np.concatenate([[[0, 0]], np.cumsum(self.lengths[order], axis=0)])
        lengths = sums[borders[1:]] - sums[borders[:-1]] + 1  # + 1: end of sequence
        limit = np.array([self.task.max_source_length, self.task.max_target_length])
        buckets = -(-lengths.max(axis=1) // self.bucket) * self.bucket
        batches = []
        for size in np.unique(buckets):
            members = np.flatnonzero((buckets == size) & (lengths <= limit).all(axis=1))
            rows = max(8, self.batch_tokens // int(size) // 8 * 8)
            for begin in range(0, len(members) - rows + 1, rows):
                chosen = members[begin:begin + rows]
                batches.append((int(size), [order[borders[g]:borders[g + 1]] for g in chosen]))
        return [batches[i] for i in rng.permutation(len(batches))]

    def from_step(self, step: int) -> Iterator[Batch]:
        """The batches of steps `step`, `step` + 1, ... for ever."""
        epoch = 0
        while True:
            batches = self._epoch(epoch)
            if not batches:
                raise ValueError(f"{self.task.train} has too few examples of at most "
                                 f"{self.task.max_source_length}/{self.task.max_target_length} tokens "
                                 "for one batch: lower batch_tokens or raise the limits.")
            for size, groups in batches[step:]:
                yield self._batch(size, groups)
            step = max(0, step - len(batches))
            epoch += 1

    def _batch(self, size: int, groups: list[np.ndarray]) -> Batch:
        def join(tokens: list[list[int]], group: np.ndarray) -> list[int]:
            return [t for i in group for t in tokens[i]] + [self.tokenizer.eos_id]

        source = pad([join(self.sources, g) for g in groups], size, self.tokenizer.pad_id)
        target = pad([join(self.targets, g) for g in groups], size, self.tokenizer.pad_id)
        return Batch(*source, *target)

