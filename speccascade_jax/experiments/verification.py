"""Block verification compared with token verification: tokens per verifier call, and whole decodings."""

import dataclasses
import itertools
from typing import Any

from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.verification import BLOCK, TOKEN, VERIFICATIONS
from speccascade_jax.evaluation import plots, turns
from speccascade_jax.evaluation.turns import (
    Ratio,
    measure_counts,
    times_as_fast,
    tokens_a_call,
)
from speccascade_jax.evaluation.verifier_calls import fewer, measure_texts
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

WAYS = (TOKEN.name, BLOCK.name)


@dataclasses.dataclass(frozen=True)
class Calls:
    """Tokens per verifier call, paired over inputs."""

    pairs: tuple[str, ...]
    rules: tuple[tuple[str, float], ...]  # methods and their leniences
    block_sizes: tuple[int, ...]
    inputs: int
    seeds: int
    temperature: float = 1.0
    split: str = "test"
    batch_size: int = 32

    def check(self) -> None:
        for name in self.pairs:
            check_pair(pair(name), self.split)

    def measure(self, bench: Bench) -> Findings:
        rows, curves = list[list[Any]](), dict[str, list[tuple[int, Ratio]]]()
        for name in self.pairs:
            texts = inputs_of(pair(name), self.split, self.inputs)
            decoders = {
                f"{way}, {method}, {alpha:g}, {size}": pair(
                    name,
                    router=None,
                    method=method,
                    alpha=alpha,
                    block_size=size,
                    verification=way,
                    temperature=self.temperature,
                    batch_size=self.batch_size,
                )
                for (method, alpha), size, way in itertools.product(self.rules, self.block_sizes, WAYS)
            }
            path = bench.folder / f"calls-{name}.jsonl"
            counts = measure_counts(decoders, texts, path, seeds=self.seeds, track=bench.track)
            for (method, alpha), size in itertools.product(self.rules, self.block_sizes):
                token, block = (counts[f"{way}, {method}, {alpha:g}, {size}"] for way in WAYS)
                ratio = tokens_a_call(block, token)
                values = (f"{tokens_a_call(counted).value:.2f}" for counted in (token, block))
                rows.append([f"`{name}`", f"`{method}`, {alpha:g}", size, *values, f"{ratio:.3f}"])
                curves.setdefault(f"{name}, {method}, {alpha:g}", []).append((size, ratio))
        return Findings({"calls": self._table(rows)}, {"verification": self._picture(curves)})

    def _table(self, rows: list[list[Any]]) -> Table:
        return table(
            f"Tokens per verifier call at temperature {self.temperature:g}, at most {self.inputs} inputs "
            f"per pair, each decoded with {self.seeds} seeds (95%, paired over inputs).",
            ("pair", "rule, alpha", "block size", *WAYS, f"{BLOCK.name} over {TOKEN.name}"),
            rows,
        )

    def _picture(self, curves: dict[str, list[tuple[int, Ratio]]]) -> Any:
        panel = f"Temperature {self.temperature:g}"
        label = f"Tokens per verifier call, {BLOCK.name} over {TOKEN.name}"
        return plots.lines({panel: curves}, "Block size", label, level=1.0)


@dataclasses.dataclass(frozen=True)
class Expected:
    """Expected tokens per verifier call on the same texts, for both verifications."""

    pairs: tuple[str, ...]
    rules: tuple[tuple[str, float], ...]  # methods and their leniences
    block_sizes: tuple[int, ...]
    inputs: int
    seeds: int
    decoded_with: int = 8  # block size of the decodings, which does not affect their distribution
    temperature: float = 1.0
    split: str = "test"
    batch_size: int = 32

    def check(self) -> None:
        for name in self.pairs:
            check_pair(pair(name), self.split)

    def measure(self, bench: Bench) -> Findings:
        expected, counted = list[list[Any]](), list[list[Any]]()
        for name, (method, alpha) in itertools.product(self.pairs, self.rules):
            texts = inputs_of(pair(name), self.split, self.inputs)
            run = pair(
                name,
                router=None,
                method=method,
                alpha=alpha,
                block_size=self.decoded_with,
                temperature=self.temperature,
                batch_size=self.batch_size,
            )
            path = bench.folder / f"texts-{name}-{method}-{alpha:g}.jsonl"
            along = measure_texts(run, texts, path, seeds=self.seeds, track=bench.track)
            label = f"`{name}`", f"`{method}`, {alpha:g}"
            for size in self.block_sizes:
                token, block = (along.calls(VERIFICATIONS[way], size) for way in WAYS)
                rates = (f"{along.tokens.sum() / calls.sum():.2f}" for calls in (token, block))
                expected.append([*label, size, *rates, f"{fewer(block, token):.3f}"])
            theirs = along.calls(VERIFICATIONS[run.verification], self.decoded_with)
            rates = (f"{along.tokens.sum() / calls.sum():.2f}" for calls in (along.counted, theirs))
            counted.append([*label, *rates])
        return Findings({"expected": self._table(expected), "counted": self._check(counted)})

    def _table(self, rows: list[list[Any]]) -> Table:
        return table(
            f"Tokens per verifier call at temperature {self.temperature:g}, expected along the texts of "
            f"at most {self.inputs} inputs per pair, with {self.seeds} seeds each (95%, over inputs).",
            ("pair", "rule, alpha", "block size", *WAYS, f"{BLOCK.name} over {TOKEN.name}"),
            rows,
        )

    def _check(self, rows: list[list[Any]]) -> Table:
        return table(
            f"Tokens per verifier call in the decodings that wrote these texts, {TOKEN.name} by {TOKEN.name} "
            f"with block size {self.decoded_with}, as counted and as expected.",
            ("pair", "rule, alpha", "counted", "expected"),
            rows,
        )


@dataclasses.dataclass(frozen=True)
class Times:
    """Times whole lossless decodings with both verifications, and the verifier alone, in turn."""

    config: str
    block_sizes: tuple[int, ...]
    temperatures: tuple[float, ...]
    dtypes: tuple[str, ...]
    batch_size: int
    timed: int
    trials: int
    suffix: str = ""  # of the table's name
    method: str = "speculative"
    split: str = "test"

    def check(self) -> None:
        check_pair(pair(self.config), self.split)

    def measure(self, bench: Bench) -> Findings:
        panels = list(itertools.product(self.dtypes, self.temperatures))
        decoders = {
            (dtype, temperature, *decoder): run
            for dtype, temperature in panels
            for decoder, run in self._decoders(dtype, temperature).items()
        }
        names = {", ".join(map(str, key)): key for key in decoders}
        runs = {name: decoders[key] for name, key in names.items()}
        texts = inputs_of(pair(self.config), self.split, timed_inputs(self.timed, self.batch_size))
        times = times_of(bench, f"times-{self.batch_size}.jsonl", runs, texts, self.trials)
        of = {names[name]: taken for name, taken in times.items()}
        rows = [
            [
                dtype,
                f"{temperature:g}",
                *self._cells({key[2:]: of[key] for key in of if key[:2] == (dtype, temperature)}),
            ]
            for dtype, temperature in panels
        ]
        return Findings({f"times-{self.config}{self.suffix}".replace("_", "-"): self._table(rows)})

    def _decoders(self, dtype: str, temperature: float) -> dict[Any, DecodeConfig]:
        run = pair(
            self.config,
            router=None,
            method=self.method,
            alpha=0.0,
            dtype=dtype,
            temperature=temperature,
            batch_size=self.batch_size,
        )
        decoders = {
            (way, size): dataclasses.replace(run, verification=way, block_size=size)
            for way, size in itertools.product(WAYS, self.block_sizes)
        }
        return {("verifier",): dataclasses.replace(run.by("verifier"), block_size=1), **decoders}

    def _cells(self, times: dict[Any, turns.Times]) -> list[str]:
        """The speed of each verification at its fastest block size, and their comparison."""
        alone = times["verifier",]
        fastest = {
            way: max(self.block_sizes, key=lambda size: times_as_fast(times[way, size], alone).value)
            for way in WAYS
        }
        token, block = (times[way, fastest[way]] for way in WAYS)
        speeds = [f"{times_as_fast(times[way, size], alone)} at {size}" for way, size in fastest.items()]
        return [*speeds, f"{times_as_fast(block, token):.3f}"]

    def _table(self, rows: list[list[Any]]) -> Table:
        sizes = ", ".join(map(str, self.block_sizes))
        return table(
            f"Lossless decoding of `{self.config}` at batch size {self.batch_size}, times as fast as the "
            f"verifier alone, each way at the fastest of the block sizes {sizes}; {self.timed} inputs (or a "
            f"quarter as many batches) in turn, trials: {self.trials} (95%, paired over these).",
            ("dtype", "T", *WAYS, f"{BLOCK.name} over {TOKEN.name}"),
            rows,
        )
