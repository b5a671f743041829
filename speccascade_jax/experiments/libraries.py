"""Lossless decoding of the shipped pair, compared with other libraries that use the same weights."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.samplers.named import SINGLE_MODEL
from speccascade_jax.evaluation import other_libraries
from speccascade_jax.evaluation.turns import (
    Cascades,
    Decode,
    Times,
    measure_times,
    times_as_fast,
    tokens_a_call,
)
from speccascade_jax.experiments.findings import Bench, Findings, check_pair, inputs_of, pair, table
from speccascade_jax.inference.text import Cascade, Output


@dataclasses.dataclass(frozen=True)
class Libraries:
    """Times whole decodings in turn, at temperature 0 and batch size 1. Other libraries use float32."""

    config: str
    libraries: tuple[str, ...]
    dtypes: tuple[str, ...]
    block_size: int
    timed: int
    trials: int
    method: str = "speculative"
    least_source: int = 20  # least tokens of an input
    split: str = "test"

    def check(self) -> None:
        check_pair(pair(self.config), self.split)
        other_libraries.check_installed(self.libraries)

    def measure(self, bench: Bench) -> Findings:
        texts = inputs_of(pair(self.config), self.split, self.timed, self.least_source)
        cascades, run = Cascades(texts), self._run("float32", self.method)
        ours = {
            f"{name}, {dtype}": self._run(dtype, name)
            for dtype in self.dtypes
            for name in (*SINGLE_MODEL, self.method)
        }
        cascade = cascades.of(run)
        others = other_libraries.decoders(self.libraries, run, cascade, self.block_size)
        decoders: dict[str, Decode] = {name: cascades.decoder(decoder) for name, decoder in ours.items()}
        decoders |= {name: elsewhere(cascade, decode) for name, decode in others.items()}
        times = measure_times(
            decoders,
            texts,
            bench.folder / "times.jsonl",
            {"runs": {name: decoder.record("missing", "examples", "task") for name, decoder in ours.items()}},
            group=1,
            trials=self.trials,
            track=bench.track,
        )
        return Findings({"ratios": self._table(times, list(others))})

    def _run(self, dtype: str, method: str) -> DecodeConfig:
        size = 1 if method in SINGLE_MODEL else self.block_size
        return pair(self.config, router=None, alpha=0.0, dtype=dtype, block_size=size).by(method)

    def _table(self, times: dict[str, Times], others: Sequence[str]) -> dict[str, Any]:
        ours = [times[f"{self.method}, {dtype}"] for dtype in self.dtypes]
        rows = [
            [
                f"our {model} alone, same dtype",
                *(
                    f"{times_as_fast(here, times[f'{model}, {dtype}'])}"
                    for here, dtype in zip(ours, self.dtypes, strict=True)
                ),
            ]
            for model in SINGLE_MODEL
        ]
        rows += [[other, *(f"{times_as_fast(here, times[other])}" for here in ours)] for other in others]
        rows.append(["tokens per verifier call", *(f"{tokens_a_call(here).value:.2f}" for here in ours)])
        return table(
            f"Lossless decoding at block size {self.block_size} and temperature 0, {self.timed} inputs in "
            f"turn, {self.trials} trials: tokens per second relative to theirs (95%, paired over inputs).",
            ["times as fast as", *(f"in {dtype}" for dtype in self.dtypes)],
            rows,
        )


def elsewhere(cascade: Cascade, decode: other_libraries.Decode) -> Decode:
    """Another library's decoder in the form that turns.measure_times takes."""

    def in_turn(first: int, texts: Sequence[str]) -> tuple[float, list[Output]]:
        rows, _ = cascade.encode(texts, truncate=True)
        decoded = [decode(row) for row in rows]
        outputs = [
            Output(first + n, text, cascade.tokenizer.decode(tokens), tokens, [], {})
            for n, (text, (_, tokens)) in enumerate(zip(texts, decoded, strict=True))
        ]
        return sum(spent for spent, _ in decoded), outputs

    return in_turn
