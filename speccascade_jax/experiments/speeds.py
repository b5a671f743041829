"""The speedup of lossless decoding over the verifier alone."""

import dataclasses
import itertools
from typing import Any

from speccascade_jax.config import DecodeConfig
from speccascade_jax.evaluation import plots, turns
from speccascade_jax.evaluation.turns import Ratio, times_as_fast
from speccascade_jax.experiments.findings import (
    Bench,
    Findings,
    Table,
    check_pair,
    inputs_of,
    pair,
    table,
    timed_inputs,
    times_of,
)


@dataclasses.dataclass(frozen=True)
class Lossless:
    """Measures it by dtype, block size and batch size, next to the drafter alone."""

    config: str
    block_sizes: tuple[Any, ...]
    temperatures: tuple[float, ...]
    dtypes: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    timed: int
    trials: int
    method: str = "speculative"
    least_source: int = 20  # least tokens of an input
    split: str = "test"
    suffix: str = ""  # of the names of its tables and its picture

    def check(self) -> None:
        check_pair(pair(self.config), self.split)

    def measure(self, bench: Bench) -> Findings:
        speeds, calls = list[list[Any]](), list[list[Any]]()
        curves = {f"Temperature {t:g}": dict[str, list[tuple[int, Ratio]]]() for t in self.temperatures}
        for batch_size in self.batch_sizes:
            decoders = self._decoders(batch_size)
            runs = {", ".join(map(str, key)): run for key, run in decoders.items()}
            count = timed_inputs(self.timed, batch_size)
            texts = inputs_of(pair(self.config), self.split, count, self.least_source)
            times = times_of(bench, f"times-{batch_size}.jsonl", runs, texts, self.trials)
            of = dict(zip(decoders, times.values(), strict=True))
            for temperature, dtype in itertools.product(self.temperatures, self.dtypes):
                panel: dict[Any, turns.Times] = {
                    key[2]: of[key] for key in of if key[:2] == (temperature, dtype)
                }
                place, alone = [f"{temperature:g}", dtype, batch_size], panel["verifier"]
                ratios = {size: times_as_fast(panel[size], alone) for size in self.block_sizes}
                step = 1e3 * alone.seconds.sum() / alone.tokens.sum()
                drafter = times_as_fast(panel["drafter"], alone)
                speeds.append(
                    [*place, f"{step:.2f}", f"{drafter.value:.1f}", *(f"{r}" for r in ratios.values())]
                )
                emitted = (panel[size].tokens.sum() / panel[size].rounds.sum() for size in self.block_sizes)
                calls.append([*place, *(f"{tokens:.2f}" for tokens in emitted)])
                curves[f"Temperature {temperature:g}"][f"{dtype}, batch size {batch_size}"] = [
                    (size, ratio) for size, ratio in ratios.items() if isinstance(size, int)
                ]
        picture = plots.lines(curves, "Block size", "Times as fast as the verifier alone", level=1.0)
        tables = {"speeds": self._speeds(speeds), "calls": self._calls(calls)}
        return Findings(
            {name + self.suffix: shown for name, shown in tables.items()}, {"lossless" + self.suffix: picture}
        )

    def _decoders(self, batch_size: int) -> dict[Any, DecodeConfig]:
        """(temperature, dtype, a model or a block size) -> decoder."""
        decoders = {}
        for temperature, dtype in itertools.product(self.temperatures, self.dtypes):
            run = pair(
                self.config,
                router=None,
                alpha=0.0,
                temperature=temperature,
                dtype=dtype,
                batch_size=batch_size,
            )
            for model in ("verifier", "drafter"):
                decoders[temperature, dtype, model] = dataclasses.replace(run.by(model), block_size=1)
            for size in self.block_sizes:
                decoders[temperature, dtype, size] = dataclasses.replace(
                    run, method=self.method, block_size=size
                )
        return decoders

    @property
    def _columns(self) -> list[str]:
        return [f"block size {size}" if isinstance(size, int) else str(size) for size in self.block_sizes]

    def _speeds(self, rows: list[list[Any]]) -> Table:
        return table(
            f"Tokens per second of lossless decoding with `{self.config}`, relative to the verifier alone; "
            f"{self.timed} inputs of {self.least_source} tokens or more (or a quarter as many batches) in "
            f"turn, {self.trials} trials (95%, paired over these).",
            ("T", "dtype", "batch size", "verifier, ms per token", "drafter alone", *self._columns),
            rows,
        )

    def _calls(self, rows: list[list[Any]]) -> Table:
        return table(
            f"Tokens per verifier call of the same decodings with `{self.config}`.",
            ("T", "dtype", "batch size", *self._columns),
            rows,
        )
