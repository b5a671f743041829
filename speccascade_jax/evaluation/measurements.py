"""The measurements of a sweep on one split: every point's quality in batches, and its latency at batch size
1."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from speccascade_jax.config import DecodeConfig, Task
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation.quality import check_references
from speccascade_jax.evaluation.reductions import Comparison, compare
from speccascade_jax.evaluation.sweep import OneShape, Quality, measure_latency, measure_quality
from speccascade_jax.inference.progress import track
from speccascade_jax.inference.text import Cascade
from speccascade_jax.parallel import local_mesh
from speccascade_jax.settings import Settings
from speccascade_jax.training.data import joined_examples

SWEPT = (
    *(field.name for field in dataclasses.fields(Settings)),
    "batch_size",
    "prefix_cache_bytes",
    "truncate",
    "task",
    "missing",
    "examples",
)
"""Fields of a config that are stored with each point, or that do not affect results."""


class Measurements:
    """The measurements of one split.

    limit: use only the first `limit` examples. timed: the number of random examples to time, `trials` times
    each; 0 times none. Raises ValueError if the split has no examples or references that its metric cannot
    use.
    """

    def __init__(
        self,
        run: DecodeConfig,
        task: Task,
        split: str,
        *,
        limit: int | None,
        timed: int,
        trials: int,
        screen: Console,
    ):
        self.run, self.task, self.timed = run.on_this_machine(), task, timed
        self.trials, self.screen = trials, screen
        examples = joined_examples(task, getattr(task, split))[:limit]
        if not examples:
            raise FieldError("split", split, "choose another --split.", f"the {split} split is empty")
        self.sources = [source for source, _ in examples]
        self.references = [references for _, references in examples]
        check_references(task.metric, self.references)
        self.settings = self.run.record(*SWEPT)
        self.settings |= {"split": split, "join": task.join, "metric": task.metric, "examples": len(examples)}

    def qualities(self, points: list[Settings], folder: Path) -> dict[Settings, Quality]:
        """The quality of every point. Points already in `folder` are not measured again."""
        batched = self._padded_alike(self.sources, local_mesh())
        for point in points:  # before decoding any
            batched.checked(point, {})
        qualities = measure_quality(
            batched,
            points,
            self.sources,
            self.references,
            self.task.metric,
            folder / "quality.jsonl",
            self.settings,
            batch_size=self.run.batch_size,
            track=self._track,
        )
        self._say("quality", batched, points)
        return qualities

    def measure(self, points: list[Settings], folder: Path) -> list[Comparison]:
        """Compares every point with the verifier alone in quality and latency."""
        qualities, latencies, sources = self.qualities(points, folder), {}, self.sources
        if self.timed:
            chosen = np.random.default_rng(self.run.seed).permutation(len(sources))[: self.timed]
            timed = [sources[n] for n in chosen]
            single = self._padded_alike(timed, None)
            latencies = measure_latency(
                single,
                points,
                timed,
                folder / "latency.jsonl",
                {**self.settings, "timed": self.timed, "trials": self.trials},
                trials=self.trials,
                track=self._track,
            )
            self._say("latency", single, points)
        return compare(self.task.metric, qualities, latencies)

    def _padded_alike(self, sources: list[str], mesh: Mesh | None) -> Cascade:
        """The cascade, with all of `sources` padded to the same length."""
        cascade = OneShape.from_config(self.run, mesh)
        longest = max(map(len, cascade.encode(sources, truncate=True)[0]))
        return dataclasses.replace(cascade, max_source_length=Cascade.bucket(cascade, longest))

    def _track(self, items: Sequence[Any], name: str) -> Iterator[Any]:
        return iter(track(items, name, console=self.screen))

    def _say(self, what: str, cascade: Cascade, points: list[Settings]) -> None:
        clock, programs = cascade.clock, len({(p.method, p.block_size) for p in points})
        self.screen.print(
            f"{what}: {len(points)} points of {programs} methods and block sizes; "
            f"{clock.compilations} programs compiled in {clock.compile_seconds:.0f} s, "
            f"decoding {clock.decode_seconds:.0f} s."
        )
