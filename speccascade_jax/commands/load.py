"""Load-tests a server: throughput and latency for sizing, and ratios that carry over to other machines.

    python scripts/load.py --config=demo --minutes=10 --output=load.json

This measures, three times in turn, decoding of the same texts by the decode command, the server at
saturation, a server with one row (one request at a time) and, with --vs-transformers, a server that answers
with transformers, one request at a time. Then it measures the server at 50% and 90% load (time to first
token) and at 120% load (memory and refusals). Each measurement is printed next to the scheduler simulation's
prediction, which uses the times of a round and of a prompt, and the saturated server's requests per second.

    python scripts/load.py --config=demo --replicas=2

This measures replicas on a Ray cluster instead, and kills some of them.

    python scripts/load.py --config=demo --by-load 1 4 8 16 32

This compares block sizes that adapt to the load with fixed ones and with the verifier alone.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np

from speccascade_jax import checkpoints
from speccascade_jax import config as configs
from speccascade_jax.commands.commandline import at_least, console, exit_code, parsed
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation.load import Body, Load, closed_loop, merged, open_loop
from speccascade_jax.evaluation.load_blocks import compared
from speccascade_jax.evaluation.losses import Killer, texts_of, under_kills
from speccascade_jax.evaluation.other_libraries import check_installed, exported, transformers_decoders
from speccascade_jax.inference.inputs import read_texts
from speccascade_jax.inference.outputs import write_whole
from speccascade_jax.inference.progress import track
from speccascade_jax.inference.text import Cascade
from speccascade_jax.planning.simulation import SimulatedServer, simulate
from speccascade_jax.scheduling.continuous import Continuous
from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.serving.engine import ROUNDS

TIMED = 50  # the number of rounds whose median time is taken
PASSES = 3  # the number of passes of each server over the texts
FILE = "decode.py"  # what decodes the texts from a file


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments of the command."""

    config: str = "demo"
    """A config name or path."""
    input: str | None = None
    """A .txt or .jsonl file with texts. Default: the config's examples."""
    requests: int = 400
    """The number of requests for measuring the throughput of each server."""
    rows: int = 8
    """The batch size of the server and of the decode command."""
    clients: int = 32
    """The number of concurrent clients that saturate the server."""
    minutes: float = 1.0
    """Minutes at 120% load. The measurements at 50% and 90% load take at most one minute each."""
    vs_transformers: bool = False
    """Also measure a server that decodes with transformers (T5 only; needs torch and transformers)."""
    replicas: int | None = None
    """Measure serve.py --ray=local instead: compare one replica with this many, then kill replicas for
    --minutes and record what clients see."""
    by_load: tuple[int, ...] = ()
    """Batch sizes. For each one, compare --block-size=load of a server with the config's fixed block size and
    with the verifier alone, and measure nothing else. Decoding is lossless, in this process and without
    HTTP."""
    output: str | None = None
    """A JSON file to write the figures to."""


class Server:
    """scripts/serve.py in a separate process."""

    def __init__(self, config: str, rows: int, queue: int, *flags: str):
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from speccascade_jax.commands import launch; launch()",
                "serve",
                f"--config={config}",
                "--port=0",
                f"--rows={rows}",
                f"--max-queue={queue}",
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.url = ""

    def until_ready(self) -> None:
        if not self.url and self.process.stdout is not None:
            self.url = self.process.stdout.readline().strip()
        while True:
            if self.process.poll() is not None:
                raise ValueError("the server did not start; run scripts/serve.py to see why.")
            with contextlib.suppress(URLError):
                if urlopen(self.url + "/ready").status == 200:
                    return
            time.sleep(0.5)

    def megabytes(self) -> float:
        """The resident memory of the server."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


@contextlib.contextmanager
def served(config: str, rows: int, queue: int, *flags: str) -> Iterator[Server]:
    server = Server(config, rows, queue, *flags)
    try:
        yield server
    finally:
        server.end()


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

    def server(self, times: dict[str, float], saturated: float) -> SimulatedServer:
        """A server with these times whose largest rate is `saturated` requests per second. That gives what a
        request costs beyond its rounds and its prompt, most of it HTTP."""
        milliseconds = {
            "round_seconds": times["round_ms"],
            "prompt_seconds": times["prefill_ms"],
            "together_seconds": times["prefill_together_ms"],
        }
        seconds = {name: value / 1000 for name, value in milliseconds.items()}
        server = SimulatedServer(rows=self.rows, queue=self.rows, rounds=ROUNDS, **seconds)
        return server.saturated_by(self.rounds, saturated)

    def simulated(self, server: SimulatedServer, rate: float, seconds: float) -> dict[str, Any]:
        """The latencies that clients of such a server should see, simulated from its scheduler's rules."""
        numbers = np.arange(max(round(rate * seconds), 1)) % len(self.texts)
        tokens, rounds, widths = self.tokens[numbers], self.rounds[numbers], self.widths[numbers]
        return simulate(server, tokens, rounds, rate, widths=widths).summary()

    def times(self) -> dict[str, float]:
        """The milliseconds of a round, of reading one prompt, and of reading several together (per prompt),
        with the programs of a full batch."""
        requests = self._requests()
        crowded, quiet = self._scheduler(), self._scheduler()
        crowded.admit(requests)
        together = [turn(crowded) for _ in range(TIMED) if crowded.busy][1:]  # the first fills all rows
        alone = []
        for request in requests[:TIMED]:
            quiet.admit([request])
            alone.append(turn(quiet))
        rounds = [seconds for seconds, prompts in together + alone[1:] if prompts == 0]
        round_seconds = median(rounds) if rounds else 0.0

        def reading(turns: Sequence[tuple[float, int]]) -> float:
            """The median seconds per prompt."""
            spent = [(seconds - round_seconds) / prompts for seconds, prompts in turns if prompts]
            return max(median(spent), 0.0) if spent else 0.0

        single = [(seconds, prompts) for seconds, prompts in alone[1:] if prompts == 1]
        return {
            "round_ms": 1000 * round_seconds,
            "prefill_ms": 1000 * reading(single or together),
            "prefill_together_ms": 1000 * reading(together or single),
        }

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


@contextlib.contextmanager
def transformers_server(run: DecodeConfig) -> Iterator[str]:
    """Runs a server that answers with transformers' greedy verifier, one request at a time. Yields its
    URL."""
    cascade = Cascade.from_config(run)
    with tempfile.TemporaryDirectory() as folder:
        verifier = exported(checkpoints.load(run.roles[-1][1]), Path(folder) / "verifier")
        [decode] = transformers_decoders(verifier, run.max_new_tokens).values()
    turn = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            [row], _ = cascade.encode([body["prompt"]])
            with turn:
                _, tokens = decode(row)
            events: list[Any] = [
                {"choices": [{"text": cascade.tokenizer.decode(tokens)}]},
                {"choices": [], "usage": {"completion_tokens": len(tokens)}},
            ]
            self.send_response(200)
            self.end_headers()
            for event in (*map(json.dumps, events), "[DONE]"):
                self.wfile.write(f"data: {event}\n\n".encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def counters(url: str, *names: str) -> dict[str, float]:
    """The counters of a front."""
    with urlopen(url + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(line.split()[-1])
        for line in lines
        for name in names
        if line.startswith(f"speccascade:{name}_total{{")
    }


Say = Callable[[str, dict[str, Any]], None]


def measure_replicas(arguments: Arguments, count: int, method: str, bodies: Sequence[Body], say: Say) -> None:
    """Measures the throughput of one replica and of `count` replicas, and what clients see while some are
    killed."""
    rows, clients, queue = arguments.rows, arguments.clients, 2 * arguments.clients
    with contextlib.ExitStack() as stack:
        servers, loads = dict[int, Server](), dict[int, list[Load]]()
        for number in (1, count):
            flags = ("--ray=local", f"--replicas={number}", "--methods", method)
            servers[number] = stack.enter_context(served(arguments.config, rows, queue, *flags))
        for server in servers.values():
            server.until_ready()
            texts = asyncio.run(texts_of(server.url, bodies, clients))
        for number in track([*servers] * PASSES, "throughput"):
            url = servers[number].url
            loads.setdefault(number, []).append(asyncio.run(closed_loop(url, bodies, clients)))
        for number, measured in loads.items():
            ratios = sorted(
                a.tokens_per_second / b.tokens_per_second for a, b in zip(measured, loads[1], strict=True)
            )
            say(f"replicas_{number}", merged(measured).summary() | {"to_one": median(ratios)})
        kill = Killer(server.process.pid, server.url, count)
        seen = under_kills(server.url, bodies, texts, clients, 60 * arguments.minutes, kill)
        say("killed", asyncio.run(seen) | counters(server.url, "requests_moved", "streams_cut"))


def load(arguments: Arguments) -> None:
    at_least(1, requests=arguments.requests, rows=arguments.rows, clients=arguments.clients)
    at_least(2, replicas=arguments.replicas)
    at_least(1, by_load=min(arguments.by_load, default=1))
    if not 0 < arguments.minutes < 1e4:
        raise FieldError("minutes", arguments.minutes, "it must be above 0, and below 10,000.")
    if arguments.vs_transformers:
        check_installed(["hf"])
    run = configs.load(arguments.config, DecodeConfig)
    inputs = read_texts(arguments.input) if arguments.input else list(run.examples)
    inputs = [text for text in inputs if text.strip()]
    if not inputs:
        raise FieldError("input", arguments.input, "give --input.", "there are no texts")
    texts = [inputs[n % len(inputs)] for n in range(arguments.requests)]
    bodies: list[Body] = [{"prompt": text, "seed": n} for n, text in enumerate(texts)]
    screen, figures = console(), dict[str, Any]()

    def say(name: str, summary: dict[str, Any]) -> None:
        figures[name] = summary
        shown = (
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in summary.items()
        )
        screen.print(f"{name}: {', '.join(shown)}", soft_wrap=True)

    if not arguments.by_load:
        console(stderr=True).print("starting the servers: they compile for a minute or two")
    if arguments.by_load:
        figures = blocks_by_load(run, arguments.by_load, texts, partial(screen.print, soft_wrap=True))
    elif arguments.replicas is not None:
        measure_replicas(arguments, arguments.replicas, run.name, bodies, say)
    else:
        measure_server(arguments, run, texts, bodies, say)
    if arguments.output is not None:
        write_whole(arguments.output, json.dumps(figures, indent=1) + "\n")


def measure_server(
    arguments: Arguments, run: DecodeConfig, texts: Sequence[str], bodies: Sequence[Body], say: Say
) -> None:
    """Measures the server, the loop of the decode command, a server with one row, and transformers."""
    queue, alone = 2 * arguments.clients, Alone(run, arguments.rows, texts)
    with contextlib.ExitStack() as stack:
        server, single = (
            stack.enter_context(served(arguments.config, rows, queue)) for rows in (arguments.rows, 1)
        )
        for started in (server, single):
            started.until_ready()
        urls = {"saturated": server.url, "one_at_a_time": single.url}
        if arguments.vs_transformers:
            urls["transformers"] = stack.enter_context(transformers_server(run))
        for url in urls.values():
            asyncio.run(closed_loop(url, bodies[: arguments.clients], arguments.clients))
        rate, like_it = measure_throughput(alone, urls, bodies, arguments.clients, say)
        simulated = partial(alone.simulated, dataclasses.replace(like_it, queue=queue))
        measure_loads(server, bodies, rate, 60 * arguments.minutes, simulated, say)


def measure_throughput(
    alone: Alone, urls: dict[str, str], bodies: Sequence[Body], clients: int, say: Say
) -> tuple[float, SimulatedServer]:
    """Measures decoding from a file and each server in turn. Returns the saturated server's requests per
    second, and a server to simulate it by."""
    speeds, loads, cores = list[float](), dict[str, list[Load]](), list[float]()
    for name in track([FILE, *urls] * PASSES, "throughput"):
        if name == FILE:
            speeds.append(alone.tokens_per_second())
            continue
        spent = time.process_time()
        loads.setdefault(name, []).append(asyncio.run(closed_loop(urls[name], bodies, clients)))
        if name == "saturated":
            cores.append((time.process_time() - spent) / loads[name][-1].seconds)
    times = alone.times()
    waited = [reply.seconds for load in loads["saturated"] for reply in load.accepted]
    server = alone.server(times, clients / float(np.mean(waited)))  # Little's law
    times["request_ms"] = 1000 * server.request_seconds
    rounds = {"three_rounds_and_prefill_ms": 3 * times["round_ms"] + times["prefill_ms"]}
    say(FILE, {"tokens_per_second": median(speeds), **times, **rounds, "clients_cores": median(cores)})
    ours = [load.tokens_per_second for load in loads["saturated"]]
    for name, measured in loads.items():
        others = speeds if name == "saturated" else [load.tokens_per_second for load in measured]
        ratios = sorted(a / b for a, b in zip(ours, others, strict=True))
        against = FILE if name == "saturated" else "it"
        say(
            name,
            merged(measured).summary()
            | {f"ours_to_{against}": median(ratios), "least": ratios[0], "most": ratios[-1]},
        )
    return median(load.requests_per_second for load in loads["saturated"]), server


def measure_loads(
    server: Server,
    bodies: Sequence[Body],
    rate: float,
    seconds: float,
    simulated: Callable[[float, float], dict[str, Any]],
    say: Say,
) -> None:
    """Measures the server at shares of `rate`, which saturates it: latency at 50% and 90% for at most a
    minute each, refusals at 120% for `seconds`, and memory; each next to what a simulation predicts."""
    for name, share in track([("half_load", 0.5), ("load_90", 0.9), ("load_120", 1.2)], "latency"):
        duration = min(seconds, 60) if share < 1 else seconds
        say(name, under_load(server, bodies, share * rate, duration))
        say(f"{name}, simulated", simulated(share * rate, duration))


def under_load(server: Server, bodies: Sequence[Body], rate: float, seconds: float) -> dict[str, Any]:
    """What clients see at this rate of requests per second, and the server's memory meanwhile."""
    memory = list[float]()
    measured = asyncio.run(
        open_loop(
            server.url,
            lambda number: bodies[number % len(bodies)],
            rate,
            seconds,
            watch=lambda: memory.append(server.megabytes()),
        )
    )
    return measured.summary() | {"megabytes": [round(size) for size in memory]}


def blocks_by_load(
    run: DecodeConfig, rows: Sequence[int], texts: Sequence[str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Runs load_blocks.compared() for each batch size, losslessly, so that all outputs have one
    distribution."""
    cascade, figures = Cascade.from_config(run), dict[str, Any]()
    settings = dataclasses.replace(run.settings, method="speculative", alpha=0.0, alpha_after={})
    for count in rows:
        figures[str(count)] = of_rows = compared(cascade, settings, count, texts, PASSES, say)
        for name in ("by_load", "fixed", "verifier"):
            shown = ", ".join(f"{field} {value:.4g}" for field, value in of_rows[name].items())
            say(f"{count} rows, {name}: {shown}")
        say(
            f"{count} rows: by load, {of_rows['ratio']:.2f} times the throughput of the better "
            f"of the others ({of_rows['ratio_least']:.2f} to {of_rows['ratio_most']:.2f})"
        )
    return figures


def main(argv: list[str]) -> int:
    return exit_code(lambda: load(parsed(Arguments, argv, "load", __doc__)))
