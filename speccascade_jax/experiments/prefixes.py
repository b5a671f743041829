"""What reading shared beginnings of prompts once saves: few-shot prompts of a file, chats with a server."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from speccascade_jax.config import PREFIX_CACHE, DecodeConfig
from speccascade_jax.evaluation.fewshot import FewShotTask, Prompts, build_prompts, task_of
from speccascade_jax.evaluation.load import conversations
from speccascade_jax.evaluation.servers import served
from speccascade_jax.evaluation.sweep import DAMAGE
from speccascade_jax.experiments.findings import Bench, Findings, Table, check_data, pair, table
from speccascade_jax.experiments.runs import middle
from speccascade_jax.inference.outputs import resume
from speccascade_jax.inference.text import Cascade, Output, check_folders

BYTES = (PREFIX_CACHE, 0)
"""Of the prefix cache: its default, and none."""


class Trial(NamedTuple):
    times: Float[np.ndarray, "2 K"]  # with the prefix cache, and without it
    unlike: Int[np.ndarray, " K"]  # outputs that differ


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompted:
    """A pair that answers the questions of a few-shot task losslessly."""

    config: str
    task: str
    source_length: int  # tokens of a prompt, at most
    new_tokens: int  # of an answer, at most
    rows: int
    temperature: float
    dtype: str
    trials: int
    method: str = "speculative"

    def check(self) -> None:
        check_folders(self._run)
        task = self._task(0)
        for data in task.examples, task.shot_pool:
            check_data(data)

    @property
    def _run(self) -> DecodeConfig:
        return pair(
            self.config,
            method=self.method,
            alpha=0.0,
            temperature=self.temperature,
            dtype=self.dtype,
            max_source_length=self.source_length,
            max_new_tokens=self.new_tokens,
        )

    def _task(self, shots: int) -> FewShotTask:
        return dataclasses.replace(task_of(self.task), shots=shots)

    def _trials(
        self, bench: Bench, file: str, groups: int, measured: Callable[[int, int], Trial]
    ) -> dict[tuple[int, int], Trial]:
        """The trials of each group, read from `file` if it has them, measured by measured(trial, group)
        otherwise."""
        known = dict[tuple[int, int], Trial]()

        def read(_: int, line: Any) -> None:
            try:
                known[line["trial"], line["group"]] = Trial(np.array(line["times"]), np.array(line["unlike"]))
            except DAMAGE:
                raise ValueError("no trial of these prompts") from None

        _, written = resume(bench.folder / file, dataclasses.asdict(self), read)
        work = [(trial, group) for trial in range(self.trials) for group in range(groups)]
        with written:
            for trial, group in bench.track([place for place in work if place not in known], "trials"):
                known[trial, group] = new = measured(trial, group)
                figures = {name: value.tolist() for name, value in new._asdict().items()}
                written.add({"trial": trial, "group": group, **figures})
        return known


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShot(Prompted):
    """Decodes a file of few-shot prompts with the prefix cache and without it, in turn."""

    shots: int
    inputs: int

    def measure(self, bench: Bench) -> Findings:
        prompts = build_prompts(self._task(self.shots), 0, self.inputs)
        cascades = [
            Cascade.from_config(dataclasses.replace(self._run, prefix_cache_bytes=size)) for size in BYTES
        ]
        known = self._trials(bench, "trials.jsonl", 1, lambda *_: self._trial(cascades, prompts))
        seconds = np.array([trial.times[:, 0] for trial in known.values()])
        row = [
            *(middle(each, ".1f") for each in seconds.T),
            middle(seconds[:, 1] / seconds[:, 0]),
            sum(int(trial.unlike[0]) for trial in known.values()),
        ]
        lengths, [shown] = (
            [len(row) for row in cascades[0].encode(texts)[0]] for texts in (prompts.texts, [prompts.shown])
        )
        return Findings({"few-shot": self._table(row, lengths, shown)})

    def _trial(self, cascades: Sequence[Cascade], prompts: Prompts) -> Trial:
        (fast, outputs), (slow, others) = (self._decoded(cascade, prompts) for cascade in cascades)
        unlike = sum(a != b for a, b in zip(outputs, others, strict=True))
        return Trial(np.array([[fast], [slow]]), np.array([unlike]))

    def _decoded(self, cascade: Cascade, prompts: Prompts) -> tuple[float, list[Output]]:
        """The seconds of a decoding in which nothing was compiled, and its outputs."""
        while True:
            compiled, began = cascade.clock.compilations, time.perf_counter()
            outputs = list(
                cascade.generate(
                    prompts.texts, self._run.settings, batch_size=self.rows, beginnings=[prompts.shown]
                )
            )
            if cascade.clock.compilations == compiled:
                return time.perf_counter() - began, outputs

    def _table(self, row: list[Any], lengths: Sequence[int], shown: int) -> Table:
        return table(
            f"{self.inputs:,} prompts of {min(lengths):,} to {max(lengths):,} tokens with `{self.config}`: "
            f"the same {self.shots} worked examples of {self.task} ({shown:,} tokens), then a question. "
            f"Lossless, temperature {self.temperature:g}, {self.dtype}, batch size {self.rows}, up to "
            f"{self.new_tokens} new tokens; {self.trials} trials in turn (median, least to most).",
            ("s, examples read once", "s, read with every prompt", "times as fast", "outputs that differ"),
            [row],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chats(Prompted):
    """Chats, all at once, with a server with a prefix cache and with one without it, in turn."""

    shots: tuple[int, ...]  # worked examples that all chats begin with
    timed: int  # chats at once
    turns: int

    def measure(self, bench: Bench) -> Findings:
        with contextlib.ExitStack() as stack:
            urls = list[str]()

            def measured(trial: int, group: int) -> Trial:
                urls[:] = urls or self._started(stack)
                return self._trial(urls, self.shots[group], trial)

            known = self._trials(bench, "trials.jsonl", len(self.shots), measured)
        rows = list[list[Any]]()
        for group, shots in enumerate(self.shots):
            times, unlike = zip(*(known[trial, group] for trial in range(self.trials)), strict=True)
            for turn, each in enumerate(np.stack(times, axis=-1).swapaxes(0, 1)):  # with, without; trials
                ms = (f"{np.median(several):.0f}" for several in each)
                differ = sum(int(trial[turn]) for trial in unlike)
                rows.append([shots, turn + 1, *ms, middle(each[1] / each[0]), differ])
        return Findings({"chats": self._table(rows)})

    def _started(self, stack: contextlib.ExitStack) -> list[str]:
        """The URLs of a server for each of BYTES, once both are ready."""
        flags = (
            f"--method={self.method}",
            f"--methods={self.method}",
            f"--dtype={self.dtype}",
            f"--max-source-length={self.source_length}",
            f"--max-new-tokens={self.new_tokens}",
        )
        servers = [
            stack.enter_context(
                served(self.config, self.rows, self.timed, *flags, f"--prefix-cache-bytes={size}")
            )
            for size in BYTES
        ]
        for server in servers:
            server.until_ready()
        return [server.url for server in servers]

    def _trial(self, urls: Sequence[str], shots: int, seed: int) -> Trial:
        prompts = build_prompts(self._task(shots), 0)
        drawn = np.random.default_rng(seed).permutation(len(prompts.texts))
        questions = [
            [prompts.texts[n].removeprefix(prompts.shown) for n in chat]
            for chat in drawn[: self.timed * self.turns].reshape(self.timed, self.turns)
        ]
        fields = {"seed": seed, "temperature": self.temperature, "alpha": 0.0}
        chats = [
            asyncio.run(conversations(url, prompts.shown, questions, self._run.suffix, fields))
            for url in urls
        ]
        seconds, texts = (
            np.array([[[read(reply) for reply in chat] for chat in replies] for replies in chats])
            for read in (lambda reply: reply.first, lambda reply: reply.text)
        )
        return Trial(1000 * np.median(seconds, axis=1), (texts[0] != texts[1]).sum(axis=0))

    def _table(self, rows: list[list[Any]]) -> Table:
        return table(
            f"{self.timed} chats at once with a server of `{self.config}`, in each of which {self.turns} "
            f"questions of {self.task} follow worked examples: time to the first token, median over the "
            f"chats and over {self.trials} trials in turn (ratio: least to most). Lossless, temperature "
            f"{self.temperature:g}, {self.dtype}, {self.rows} rows, up to {self.new_tokens} new tokens.",
            (
                "examples",
                "turn",
                "ms, with the prefix cache",
                "ms, without it",
                "times as fast",
                "answers that differ",
            ),
            rows,
        )
