"""The speed that `decode.py` prints: whole runs of the command, each in a separate process."""

import dataclasses
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax.evaluation.sweep import DAMAGE
from speccascade_jax.evaluation.turns import described
from speccascade_jax.experiments.findings import Bench, Findings, Table, check_pair, inputs_of, pair, table
from speccascade_jax.inference.outputs import resume

COMMAND = "import sys; from speccascade_jax.commands import main; sys.exit(main(sys.argv[1:]))"


@dataclasses.dataclass(frozen=True)
class Runs:
    """Compares a method with a baseline; all other settings are those of the config."""

    config: str
    method: str
    baseline: str
    block_sizes: tuple[int, ...]
    temperatures: tuple[float, ...]
    dtypes: tuple[str, ...]
    timed: int  # inputs per run
    trials: int
    least_source: int = 20  # least tokens of an input
    split: str = "test"

    def check(self) -> None:
        check_pair(pair(self.config), self.split)

    def measure(self, bench: Bench) -> Findings:
        texts = inputs_of(pair(self.config), self.split, self.timed, self.least_source)
        rows = list[list[Any]]()
        for temperature, dtype in itertools.product(self.temperatures, self.dtypes):
            speeds = self._speeds(bench, temperature, dtype, texts)
            alone = speeds[self.baseline]
            ratios = [values / alone for name, values in speeds.items() if name != self.baseline]
            rows.append([f"{temperature:g}", dtype, middle(alone, ".0f"), *(middle(r) for r in ratios)])
        return Findings({"runs": self._table(rows)})

    def _speeds(
        self, bench: Bench, temperature: float, dtype: str, texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Tokens per second of the baseline and at each block size, one figure per trial. Runs take turns."""
        same = ("--config", self.config, "--temperature", f"{temperature:g}", "--dtype", dtype)
        flags: dict[str, tuple[str, ...]] = {self.baseline: (*same, "--method", self.baseline)}
        flags |= {
            f"block size {size}": (*same, "--method", self.method, "--alpha", "0", "--block-size", str(size))
            for size in self.block_sizes
        }
        speeds = np.full((len(flags), self.trials), np.nan)

        def read(_: int, line: Any) -> None:
            try:
                speeds[line["run"], line["trial"]] = float(line["tokens_per_second"])
            except DAMAGE:
                raise ValueError("no speed of a run") from None

        path = bench.folder / f"runs-{temperature:g}-{dtype}.jsonl"
        kept = {"flags": {name: list(words) for name, words in flags.items()}, "trials": self.trials}
        _, file = resume(path, {**described(texts), **kept}, read)
        work = [(t, n) for t in range(self.trials) for n in range(len(flags)) if np.isnan(speeds[n, t])]
        with file:
            for trial, n in bench.track(work, f"runs at {temperature:g} in {dtype}"):
                speeds[n, trial] = tokens_per_second(list(flags.values())[n], texts)
                file.add({"run": n, "trial": trial, "tokens_per_second": speeds[n, trial]})
        return dict(zip(flags, speeds, strict=True))

    def _table(self, rows: list[list[Any]]) -> Table:
        return table(
            f"Tokens per second that `decode.py --config={self.config}` prints over {self.timed} inputs of "
            f"{self.least_source} tokens or more: `{self.method}` relative to `{self.baseline}`, "
            f"{self.trials} runs of each in turn (median, least to greatest).",
            (
                "T",
                "dtype",
                f"{self.baseline}, tokens per second",
                *(f"block size {size}" for size in self.block_sizes),
            ),
            rows,
        )


def tokens_per_second(flags: Sequence[str], texts: Sequence[str]) -> float:
    """The speed in the summary of `decode.py` with these flags over `texts`.

    Raises ValueError with the command's message if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, summary = Path(folder, "input.txt"), Path(folder, "summary.json")
        source.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        files = ("--input", str(source), "--output", f"{folder}/out.jsonl", "--summary", str(summary))
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, "decode", *flags, *files], capture_output=True, text=True
        )
        if done.returncode:
            raise ValueError(f"decode.py failed: {done.stderr.strip()}")
        figures: Mapping[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
        return float(figures["tokens_per_second"])


def middle(values: np.ndarray, digits: str = ".2f") -> str:
    """The median, with the least and the greatest value."""
    low, median, high = (f"{value:{digits}}" for value in np.quantile(values, [0, 0.5, 1]))
    return f"{median} ({low} to {high})"
