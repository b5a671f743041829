"""The quality of each shipped model alone, also in other dtypes."""

import dataclasses
import itertools
from typing import Any

import numpy as np

from speccascade_jax.core.samplers.named import SINGLE_MODEL, VERIFIER
from speccascade_jax.evaluation.measurements import Measurements
from speccascade_jax.evaluation.quality import METRICS, bootstrap, score
from speccascade_jax.evaluation.sweep import alone
from speccascade_jax.experiments.findings import (
    Bench,
    Findings,
    check_pair,
    difference,
    pair,
    table,
    task_of,
)


@dataclasses.dataclass(frozen=True)
class Models:
    """Decodes a split greedily with either model of each pair."""

    pairs: tuple[str, ...]
    dtypes: tuple[str, ...]  # the others are compared with the first
    inputs: int
    split: str = "test"
    batch_size: int = 32

    def check(self) -> None:
        for name in self.pairs:
            check_pair(pair(name), self.split)

    def measure(self, bench: Bench) -> Findings:
        rows = list[list[Any]]()
        for name in self.pairs:
            metric = task_of(pair(name)).metric
            sums = {dtype: self._statistics(bench, name, dtype) for dtype in self.dtypes}
            first = sums[self.dtypes[0]]
            for dtype, model in itertools.product(self.dtypes, SINGLE_MODEL):
                here, verifier = sums[dtype][model], sums[dtype][VERIFIER.name]
                low, high = bootstrap(metric, here)
                rows.append(
                    [
                        f"`{name}`",
                        model,
                        dtype,
                        METRICS[metric].label,
                        f"{score(metric, here.sum(axis=0)):.1f} ({low:.1f} to {high:.1f})",
                        "" if here is first[model] else difference(bootstrap(metric, here, first[model])),
                        "" if here is verifier else difference(bootstrap(metric, here, verifier)),
                    ]
                )
        title = (
            f"Each model alone at temperature 0, {self.inputs} examples of the {self.split} split (95%, "
            "differences paired over examples)."
        )
        columns = (
            "pair",
            "model",
            "dtype",
            "metric",
            "value",
            f"over {self.dtypes[0]}",
            "over the verifier",
        )
        return Findings({"quality": table(title, columns, rows)})

    def _statistics(self, bench: Bench, name: str, dtype: str) -> dict[str, np.ndarray]:
        """Each model's statistics in the form of evaluation.quality."""
        run = pair(name, dtype=dtype, batch_size=self.batch_size)
        settings = dataclasses.replace(run.settings, temperature=0.0)
        points = {model: alone(settings, model) for model in SINGLE_MODEL}
        measurements = Measurements(
            run, task_of(run), self.split, limit=self.inputs, timed=0, trials=1, screen=bench.screen
        )
        qualities = measurements.qualities(list(points.values()), bench.folder / f"{name}-{dtype}")
        return {model: qualities[point].statistics for model, point in points.items()}
