"""The divergence that a drafter learns from, and the verifier calls that it saves."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax import config as configs
from speccascade_jax.checkpoints import huggingface, tokenizer_file
from speccascade_jax.config import DecodeConfig, TrainConfig
from speccascade_jax.evaluation.turns import Cascades, Counts, measure_counts, tokens_a_call
from speccascade_jax.experiments.findings import (
    Bench,
    Findings,
    Table,
    check_data,
    check_pair,
    inputs_of,
    pair,
    table,
)
from speccascade_jax.inference.outputs import resume
from speccascade_jax.training.reporting import portable
from speccascade_jax.training.side_by_side import Lesson, train_side_by_side

BEFORE = "before"
"""The label of the drafter that all trainings start from."""


@dataclasses.dataclass(frozen=True)
class Losses:
    """Trains a pair's drafter further with each divergence, towards each rule, and counts verifier calls.

    All trainings have the same start, the same number of steps and, for the same seed, the same batches.
    """

    config: str  # a pair with a shipped drafter
    training: str  # the training config of the drafter
    divergences: tuple[str, ...]  # the others are compared with the first
    rules: tuple[tuple[str, float], ...]  # methods and their leniences
    seeds: int
    steps: int
    batch_tokens: int
    learning_rate: float
    block_size: int
    inputs: int
    temperature: float = 1.0
    split: str = "test"
    batch_size: int = 32

    def check(self) -> None:
        check_pair(pair(self.config), self.split)
        check_data(configs.load(self.training, TrainConfig).task.train)

    @property
    def lessons(self) -> list[Lesson]:
        return [(name, *rule) for rule, name in itertools.product(self.rules, self.divergences)]

    def train_config(self) -> TrainConfig:
        run = pair(self.config)
        return dataclasses.replace(
            configs.load(self.training, TrainConfig),
            init=run.drafter,
            tokenizer=None,
            teacher=run.verifier,
            teacher_outputs=None,
            steps=self.steps,
            batch_tokens=self.batch_tokens,
            optimizer="muon",
            learning_rate=self.learning_rate,
            warmup_steps=self.steps // 20,
            decay="linear",
            clip_norm=1.0,
        )

    def folder(self, bench: Bench, lesson: Lesson, seed: int) -> Path:
        """The folder of a trained drafter."""
        divergence, method, alpha = lesson
        return bench.folder / name_of(method, alpha, divergence, seed)

    def train(self, bench: Bench) -> None:
        """Trains and saves the drafters, unless an earlier call has. Raises ValueError if that had other
        settings."""
        config, seeds = self.train_config(), range(self.seeds)
        settings = {
            "config": portable(dataclasses.asdict(config)),
            "lessons": self.lessons,
            "seeds": self.seeds,
        }
        complete, file = resume(bench.folder / "trained.jsonl", settings, lambda _, line: line)
        with file:
            if complete:
                return
            model, versions = train_side_by_side(config, self.lessons, seeds, bench.track)
            tokenizer = tokenizer_file(str(config.init))
            for version, params in versions.items():
                folder = self.folder(bench, *version)
                huggingface.save(folder, model, params)
                (folder / tokenizer.name).write_bytes(tokenizer.read_bytes())
            file.add({"drafters": len(versions)})

    def decoders(self, bench: Bench) -> Iterator[tuple[str, DecodeConfig]]:
        """(name, decoder) of each trained drafter, and of the one that they started from with each seed."""
        for (method, alpha), seed in itertools.product(self.rules, range(self.seeds)):
            run = pair(
                self.config,
                router=None,
                method=method,
                alpha=alpha,
                block_size=self.block_size,
                temperature=self.temperature,
                batch_size=self.batch_size,
                seed=seed,
            )
            yield name_of(method, alpha, BEFORE, seed), run
            for divergence in self.divergences:
                drafter = str(self.folder(bench, (divergence, method, alpha), seed))
                yield name_of(method, alpha, divergence, seed), dataclasses.replace(run, drafter=drafter)

    def measure(self, bench: Bench) -> Findings:
        self.train(bench)
        texts = inputs_of(pair(self.config), self.split, self.inputs)
        counts = dict[str, Counts]()
        for name, run in bench.track(list(self.decoders(bench)), "drafters"):
            path = bench.folder / f"{name}.jsonl"
            # Cascades of its own, because they keep every model that they load.
            counts |= measure_counts({name: run}, texts, path, seeds=1, track=quiet, cascades=Cascades(texts))
        rows = [
            self._row(counts, rule, divergence)
            for rule, divergence in itertools.product(self.rules, (BEFORE, *self.divergences))
        ]
        return Findings({f"losses-{self.config.replace('_', '-')}": self._table(rows)})

    def _row(self, counts: dict[str, Counts], rule: tuple[str, float], divergence: str) -> list[Any]:
        method, alpha = rule
        mine, first = (
            [counts[name_of(method, alpha, name, seed)] for seed in range(self.seeds)]
            for name in (divergence, self.divergences[0])
        )
        row = [f"`{method}`, {alpha:g}", divergence, f"{tokens_a_call(pooled(mine)).value:.3f}"]
        if divergence == self.divergences[0]:
            return [*row, "", ""]
        each = [tokens_a_call(*both).value for both in zip(mine, first, strict=True)]
        return [
            *row,
            f"{tokens_a_call(pooled(mine), pooled(first)):.3f}",
            ", ".join(f"{x:.3f}" for x in each),
        ]

    def _table(self, rows: list[list[Any]]) -> Table:
        first = self.divergences[0]
        return table(
            f"Tokens per verifier call of the drafter of `{self.config}`, trained for {self.steps} more "
            f"steps with each divergence from a rule's distribution, decoding with that rule: temperature "
            f"{self.temperature:g}, block size {self.block_size}, {self.inputs} inputs, {self.seeds} "
            "trainings each (95%, paired over inputs).",
            (
                "rule, alpha",
                "divergence",
                "tokens per verifier call",
                f"over {first}",
                f"over {first}, by training seed",
            ),
            rows,
        )


def name_of(method: str, alpha: float, divergence: str, seed: int) -> str:
    """The name of a drafter, of its folder and of the file of its counts."""
    return f"{method}-{alpha:g}-{divergence}-{seed}"


def pooled(counts: list[Counts]) -> Counts:
    """The sums over several drafters."""
    return Counts(*(np.sum(of_all, axis=0) for of_all in zip(*counts, strict=True)))


def quiet(items: Any, name: str) -> Any:
    """A `track` that shows nothing."""
    return iter(items)
