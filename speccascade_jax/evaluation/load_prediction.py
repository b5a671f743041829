"""What a server under load should do, from measurements in this process: the throughput from a file, and a
simulation with the times of a round and of a prompt."""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from jaxtyping import Float

from speccascade_jax.config import DecodeConfig
from speccascade_jax.inference.text import Cascade
from speccascade_jax.planning.simulation import SimulatedServer, simulate
from speccascade_jax.scheduling.continuous import Continuous
from speccascade_jax.scheduling.prompts import Request

TIMED = 50  # the number of rounds whose median time is taken


class Alone:
    """The loop of the decode command over the texts, in this process."""

    def __init__(self, run: DecodeConfig, rows: int, texts: Sequence[str]):
        self.cascade, self.settings = Cascade.from_config(run), run.settings
        self.rows, self.texts = rows, texts
        encoded, _ = self.cascade.encode(texts)
        self.widths = np.array([self.cascade.bucket(len(tokens)) for tokens in encoded])
        self.tokens_per_second()  # compiles

    def tokens_per_second(self) -> float:
        began = time.perf_counter()
        outputs = list(self.cascade.generate(self.texts, self.settings, batch_size=self.rows))
        seconds = time.perf_counter() - began
        self.tokens = np.array([len(output.tokens) for output in outputs])
        calls = [output.counts.get("rounds", len(output.tokens)) for output in outputs]
        self.rounds = np.maximum(calls, 1)
        return float(self.tokens.sum() / seconds)

    def simulated(self, server: SimulatedServer, arrivals: Float[np.ndarray, " N"]) -> dict[str, Any]:
        """The latencies that clients of such a server should see, simulated from its scheduler's rules."""
        numbers = np.arange(len(arrivals)) % len(self.texts)
        tokens, rounds, widths = self.tokens[numbers], self.rounds[numbers], self.widths[numbers]
        return simulate(server, arrivals, tokens, rounds, widths).summary()

    def server(self, queue: int, rounds_per_step: int) -> SimulatedServer:
        """A server with this queue and the measured times of rounds and prompts, which does nothing else."""
        requests = self._requests()
        crowded, quiet = self._scheduler(), self._scheduler()
        crowded.admit(requests)
        together = [turn(crowded) for _ in range(TIMED) if crowded.busy][1:]  # the first fills all rows
        alone = []
        for request in requests[:TIMED]:
            quiet.admit([request])
            alone.append(turn(quiet))
        turns = together + alone[1:] or alone
        rounds = [seconds for seconds, prompts in turns if prompts == 0]
        round_seconds = median(rounds) if rounds else min(turns)[0]

        def reading(turns: Sequence[tuple[float, int]]) -> float:
            """The median seconds per prompt."""
            spent = [(seconds - round_seconds) / prompts for seconds, prompts in turns if prompts]
            return max(median(spent), 0.0) if spent else 0.0

        single = [(seconds, prompts) for seconds, prompts in alone[1:] if prompts == 1]
        return SimulatedServer(
            rows=self.rows,
            round_seconds=round_seconds,
            prompt_seconds=reading(single or together),
            queue=queue,
            rounds=rounds_per_step,
            together_seconds=reading(together or single),
        )

    def _scheduler(self) -> Continuous:
        cascade = self.cascade
        [lane] = cascade.lanes([self.settings]).values()
        return cascade.steady_scheduler(lane.plan, lane.params, self.rows, cascade.max_source_length)

    def _requests(self) -> list[Request]:
        """One for each text."""
        [lane] = self.cascade.lanes([self.settings]).values()
        rows, _ = self.cascade.encode(self.texts)
        foreign = self.cascade.foreign_readings(self.texts)
        return [
            Request(row, self.settings, n, lane.numbers(self.settings), foreign=reading)
            for n, (row, reading) in enumerate(zip(rows, foreign, strict=True))
        ]


def turn(scheduler: Continuous) -> tuple[float, int]:
    """Runs a round, after reading prompts into free rows. Returns the seconds and the number of prompts."""
    before, began = len(scheduler.waiting), time.perf_counter()
    scheduler.run(1)
    seconds = time.perf_counter() - began
    scheduler.finished()
    return seconds, before - len(scheduler.waiting)
