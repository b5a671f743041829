"""Experiments, their requirements and their findings."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from rich.console import Console

from speccascade_jax import config as configs
from speccascade_jax.config import DecodeConfig, Task, TrainConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation.turns import Cascades, Times, measure_times
from speccascade_jax.inference.progress import track
from speccascade_jax.inference.text import Cascade, check_folders
from speccascade_jax.training.data import joined_examples

Table = dict[str, Any]
"""A table of a record: title, columns, rows."""


@dataclasses.dataclass
class Findings:
    tables: dict[str, Table]
    pictures: dict[str, Any] = dataclasses.field(default_factory=dict)  # name -> matplotlib Figure


@dataclasses.dataclass(frozen=True)
class Bench:
    """The folder for an experiment's measurements and the console for its progress."""

    folder: Path
    screen: Console

    def track(self, items: Sequence[Any], name: str) -> Iterator[Any]:
        return iter(track(items, name, console=self.screen))


class Measurement(Protocol):
    """A frozen dataclass whose fields are the settings of an experiment."""

    def check(self) -> None:
        """Raises ValueError, with what is missing, if it cannot be measured here."""

    def measure(self, bench: Bench) -> Findings:
        """Makes the measurements that bench.folder lacks."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    name: str
    summary: str  # one sentence for help texts
    record: str  # docs/results/NAME.json, which several experiments may share
    measurement: Any  # a Measurement

    def smaller(self, *, choices: int | None = None, **limits: int) -> Self:
        """A smaller version with at most these numbers of `inputs`, `timed` inputs, `seeds`, `trials` and
        `steps`, and the first `choices` of every list of settings."""
        values = {
            field.name: getattr(self.measurement, field.name)
            for field in dataclasses.fields(self.measurement)
        }
        lowered = {name: min(values[name], limits[name]) for name in values.keys() & limits.keys()}
        lowered |= {name: value[:choices] for name, value in values.items() if isinstance(value, tuple)}
        return dataclasses.replace(self, measurement=dataclasses.replace(self.measurement, **lowered))


def pair(name: str, **changes: Any) -> DecodeConfig:
    """A config of configs/ with changes to some fields, in the dtype that it has on this machine."""
    return dataclasses.replace(configs.load(name, DecodeConfig), **changes).on_this_machine()


def check_pair(run: DecodeConfig, split: str) -> None:
    """Raises FieldError, with the remedy, if a checkpoint, a trained rule or the data of a pair is
    missing."""
    check_folders(run)
    if run.router is not None and not Path(run.router).is_file():
        remedy = "train it with scripts/finetune.py."
        raise FieldError("router", run.router, remedy, f"the trained rule {run.router} is missing")
    check_data(getattr(task_of(run), split))


def check_data(data: str) -> None:
    """Raises FieldError, with the remedy, if the file of a split is missing."""
    if "://" not in data and not Path(data).exists():
        raise FieldError(
            "task", data, "set SPECCASCADE_DATA to the folder of the datasets.", f"the data {data} is missing"
        )


def task_of(run: DecodeConfig) -> Task:
    """The task that a pair is scored on. Raises FieldError if its config names none."""
    if run.task is None:
        raise FieldError("task", None, "name one in the config.")
    task: Task = configs.load(run.task, TrainConfig).task
    return task


def inputs_of(run: DecodeConfig, split: str, count: int, least: int = 1) -> list[str]:
    """`count` random inputs of a pair's task with at least `least` source tokens; always the same ones."""
    task = task_of(run)
    sources = [source for source, _ in joined_examples(task, getattr(task, split))]
    lengths = [len(row) for row in Cascade.from_config(run).encode(sources, truncate=True)[0]]
    drawn = np.random.default_rng(0).permutation(len(sources))
    return [sources[n] for n in drawn if lengths[n] >= least][:count]


def timed_inputs(count: int, batch_size: int) -> int:
    """The number of inputs to time: `count` for batch size 1, otherwise count / 4 whole batches."""
    return count if batch_size == 1 else -(-count // 4) * batch_size


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    return {"title": title, "columns": list(columns), "rows": [[str(cell) for cell in row] for row in rows]}


def times_of(
    bench: Bench, file: str, decoders: Mapping[str, DecodeConfig], texts: Sequence[str], trials: int
) -> dict[str, Times]:
    """The times of decoders with the same batch size, which take turns on each batch of texts."""
    cascades, [batch_size] = Cascades(texts), {run.batch_size for run in decoders.values()}
    return measure_times(
        {name: cascades.decoder(run) for name, run in decoders.items()},
        texts,
        bench.folder / file,
        {"runs": {name: run.record("missing", "examples", "task") for name, run in decoders.items()}},
        group=batch_size,
        trials=trials,
        track=bench.track,
    )


def difference(interval: tuple[float, float]) -> str:
    return "{:+.1f} to {:+.1f}".format(*interval)
