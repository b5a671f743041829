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
from jaxtyping import Float

from speccascade_jax.core.samplers.named import VERIFIER
from speccascade_jax.evaluation.servers import COMMAND
from speccascade_jax.evaluation.sweep import DAMAGE
from speccascade_jax.evaluation.turns import described
from speccascade_jax.experiments.findings import Bench, Findings, Table, check_pair, inputs_of, pair, table
from speccascade_jax.inference.outputs import resume


@dataclasses.dataclass(frozen=True)
class Runs:
    """The verifier alone against decoders of a config: (method, alpha, block size); all else as in it."""

    config: str
    decoders: tuple[tuple[str, float, int], ...]
    temperatures: tuple[float, ...]
    timed: int  # inputs of a run
    trials: int
    baseline: str = VERIFIER.name
    least_source: int = 20  # tokens of an input
    split: str = "test"

    def check(self) -> None:
        check_pair(pair(self.config), self.split)

    def measure(self, bench: Bench) -> Findings:
        texts = inputs_of(pair(self.config), self.split, self.timed, self.least_source)
        alone, *others = self._speeds(bench, texts)
        rows = [[self.baseline, "", "", *(f"{middle(speeds, '.0f')} tokens per second" for speeds in alone)]]
        for (method, alpha, size), speeds in zip(self.decoders, others, strict=True):
            rows.append([f"`{method}`", f"{alpha:g}", f"{size}", *map(middle, speeds / alone)])
        return Findings({"runs": self._table(rows)})

    def _flags(self) -> list[list[str]]:
        """The flags of each decoder, the baseline first."""
        same = ["--config", self.config]
        return [
            [*same, "--method", self.baseline],
            *(
                [*same, "--method", method, "--alpha", f"{alpha:g}", "--block-size", f"{size}"]
                for method, alpha, size in self.decoders
            ),
        ]

    def _speeds(self, bench: Bench, texts: Sequence[str]) -> Float[np.ndarray, "D N T"]:
        """Tokens per second of each decoder, at each temperature, in each trial. Runs take turns."""
        flags = self._flags()
        speeds = np.full((len(flags), len(self.temperatures), self.trials), np.nan)

        def read(_: int, line: Any) -> None:
            try:
                speeds[tuple(line["run"])] = float(line["tokens_per_second"])
            except DAMAGE:
                raise ValueError("no speed of a run") from None

        kept = {"flags": flags, "temperatures": list(self.temperatures), "trials": self.trials}
        _, file = resume(bench.folder / "speeds.jsonl", {**described(texts), **kept}, read)
        turns = itertools.product(range(self.trials), range(len(self.temperatures)), range(len(flags)))
        work = [(n, place, trial) for trial, place, n in turns if np.isnan(speeds[n, place, trial])]
        with file:
            for run in bench.track(work, "runs"):
                temperature = f"{self.temperatures[run[1]]:g}"
                speeds[run] = tokens_per_second([*flags[run[0]], "--temperature", temperature], texts)
                file.add({"run": list(run), "tokens_per_second": speeds[run]})
        return speeds

    def _table(self, rows: list[list[Any]]) -> Table:
        return table(
            f"Tokens per second that `decode.py --config={self.config}` prints for {self.timed} inputs of "
            f"{self.least_source} tokens or more, relative to the {self.baseline}'s; {self.trials} runs of "
            "each, in turn (median, smallest to largest).",
            ("method", "alpha", "block size", *(f"temperature {t:g}" for t in self.temperatures)),
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
