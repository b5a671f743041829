"""Races of lossless decoders (pairs, hierarchies, vocabularies, lookup) on the same inputs, in turn."""

import dataclasses
import json
from typing import Any

from speccascade_jax.config import DecodeConfig, dtype_of
from speccascade_jax.evaluation.turns import Cascades, Times, times_as_fast, tokens_a_call
from speccascade_jax.experiments.findings import (
    Bench,
    Findings,
    Table,
    check_data,
    check_pair,
    inputs_of,
    pair,
    table,
    task_of,
    times_of,
)
from speccascade_jax.inference.outputs import write_whole


@dataclasses.dataclass(frozen=True)
class Runner:
    """A config with a block size and changes to some fields."""

    config: str
    block_size: Any
    changes: tuple[tuple[str, Any], ...] = ()  # to fields of the config
    label: str = ""  # describes the changes; default: their values
    beside: str = ""  # what needs no model and drafts next to the drafter, such as lookup
    stored: bool = False  # it also searches the stored texts of the race

    @property
    def name(self) -> str:
        changes = [self.label] if self.label else [f"`{value}`" for _, value in self.changes]
        beside = [f"{self.beside} beside it"] if self.beside else []
        stored = ["stored texts"] if self.stored else []
        return ", ".join([f"`{self.config}`", *changes, *beside, *stored])

    def run(self, lookup_texts: str | None = None, **settings: Any) -> DecodeConfig:
        if self.stored:
            settings["lookup_texts"] = lookup_texts
        run = pair(self.config, router=None, block_size=self.block_size, **settings, **dict(self.changes))
        return dataclasses.replace(run, drafter=f"{self.beside}+{run.drafter}") if self.beside else run


@dataclasses.dataclass(frozen=True)
class Race:
    """Compares lossless runners, and the drafter alone if it is a model, with the verifier alone."""

    key: str  # the table's name
    baseline: str  # config of the verifier and the drafter
    runners: tuple[Runner, ...]
    temperatures: tuple[float, ...]
    timed: int
    trials: int
    dtype: str = "auto"
    method: str = "speculative"
    split: str = "test"
    least_source: int = 1  # least tokens of an input
    stored: int = 0  # inputs of the training split whose outputs are the stored texts

    def check(self) -> None:
        for runner in (Runner(self.baseline, 1), *self.runners):
            check_pair(runner.run(), self.split)
        if self.stored:
            check_data(task_of(pair(self.baseline)).train)

    def measure(self, bench: Bench) -> Findings:
        texts = inputs_of(pair(self.baseline), self.split, self.timed, self.least_source)
        decoders = {
            f"{temperature:g}, {n}": run
            for temperature in self.temperatures
            for n, run in enumerate(self._decoders(temperature, self._stored(bench, temperature)))
        }
        times = times_of(bench, f"{self.key}.jsonl", decoders, texts, self.trials)
        rows = list[list[Any]]()
        for temperature in self.temperatures:
            names = [(f"{model} alone", "") for model in pair(self.baseline).models_alone[1:]]
            names += [(runner.name, runner.block_size) for runner in self.runners]
            alone, *others = (times[f"{temperature:g}, {n}"] for n in range(1 + len(names)))
            for (name, size), taken in zip(names, others, strict=True):
                rows.append([f"{temperature:g}", name, size, *rates(taken), f"{times_as_fast(taken, alone)}"])
        return Findings({self.key: self._table(rows)})

    def _decoders(self, temperature: float, stored: str | None) -> list[DecodeConfig]:
        """The models alone, and the runners."""
        same: dict[str, Any] = {"alpha": 0.0, "temperature": temperature, "dtype": self.dtype}
        models = pair(self.baseline).models_alone
        alone = (Runner(self.baseline, 1).run(method=model, **same) for model in models)
        return [*alone, *(runner.run(stored, method=self.method, **same) for runner in self.runners)]

    def _stored(self, bench: Bench, temperature: float) -> str | None:
        """The file of the stored texts, which the verifier writes once; None if the race has none."""
        path = bench.folder / f"{self.key}-texts-{temperature:g}.jsonl"
        if self.stored and not path.exists():
            run = pair(self.baseline, router=None, temperature=temperature, dtype=self.dtype, batch_size=16)
            run = dataclasses.replace(run, method=self.method, alpha=0.0)
            sources = inputs_of(run, "train", self.stored)
            _, outputs = Cascades(sources).decoder(run)(0, sources)
            write_whole(path, "".join(json.dumps({"text": output.text}) + "\n" for output in outputs))
        return str(path) if self.stored else None

    def _table(self, rows: list[list[Any]]) -> Table:
        dtype = dtype_of(pair(self.baseline, dtype=self.dtype))
        long = f" with {self.least_source} tokens or more" if self.least_source > 1 else ""
        return table(
            f"Lossless decoders of {self.timed} inputs{long} of the {self.split} split in turn, {dtype}, "
            f"batch size 1, {self.trials} trials (95%, paired over inputs).",
            (
                "T",
                "decoder",
                "block size",
                "tokens per verifier call",
                "share of drafts accepted",
                "times as fast as the verifier alone",
            ),
            rows,
        )


def rates(taken: Times) -> list[str]:
    """Tokens per verifier call and the share of drafted tokens that are accepted, for decoders with verifier
    calls."""
    if not taken.rounds.sum():
        return ["", ""]
    return [f"{tokens_a_call(taken)}", f"{taken.accepted.sum() / max(taken.drafted.sum(), 1):.0%}"]
