"""Load-tests a server: throughput and latency for sizing, and ratios that carry over to other machines.

    python scripts/load.py --config=demo --minutes=10 --output=load.json

This measures, --passes times in turn, decoding of the same texts by the decode command, the server at
saturation, a server with one row (one request at a time) and, with --vs-transformers, a server that answers
with transformers, one request at a time. Then it measures the server at 50% and 90% load (time to first
token) and at 120% load (memory and refusals). Each measurement is printed next to the scheduler simulation's
prediction. The simulation uses the times of a round and of a prompt. What else a request and a step of the
server cost is fitted to two closed loops: one without a queue, and one with a queue whose clients pause at
random.

    python scripts/load.py --config=demo --replicas=2

This measures replicas on a Ray cluster instead, and kills some of them.

    python scripts/load.py --config=demo --by-load 1 4 8 16 32

This compares block sizes that adapt to the load with fixed ones and with the verifier alone.
"""

import asyncio
import contextlib
import dataclasses
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import numpy as np
from jaxtyping import Float

from speccascade_jax import checkpoints
from speccascade_jax import config as configs
from speccascade_jax.commands.commandline import at_least, console, exit_code, parsed
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation.load import Body, Load, closed_loop, merged, open_loop
from speccascade_jax.evaluation.load_blocks import compared
from speccascade_jax.evaluation.load_prediction import Alone
from speccascade_jax.evaluation.losses import Killer, texts_of, under_kills
from speccascade_jax.evaluation.other_libraries import check_installed, exported, transformers_decoders
from speccascade_jax.evaluation.servers import Server, served
from speccascade_jax.inference.inputs import read_texts
from speccascade_jax.inference.outputs import write_whole
from speccascade_jax.inference.progress import track
from speccascade_jax.inference.text import Cascade
from speccascade_jax.planning.simulation import Loop, SimulatedServer, fitted, poisson_arrivals
from speccascade_jax.serving.engine import ROUNDS

PAUSE = 1 / 3  # the mean pause before a request, relative to the time that a saturated server takes to answer
LOADS = {"half_load": 0.5, "load_90": 0.9, "load_120": 1.2}  # shares of the rate that saturates a server
SHOWN = ("tokens_per_second", "first_token_ms_p50", "whole_ms_p50")  # of each pass
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
    passes: int = 3
    """The number of passes of each server over the texts, in turn. Ratios are medians over the passes. More
    passes average out the noise of a machine."""
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
        for number in track([*servers] * arguments.passes, "throughput"):
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
    at_least(1, requests=arguments.requests, passes=arguments.passes)
    at_least(1, rows=arguments.rows, clients=arguments.clients)
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
        figures = blocks_by_load(arguments, run, texts, partial(screen.print, soft_wrap=True))
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
        measure_throughput(arguments, alone, urls, bodies, say)
        measure_loads(arguments, server, alone, bodies, say)


def measure_throughput(
    arguments: Arguments, alone: Alone, urls: dict[str, str], bodies: Sequence[Body], say: Say
) -> None:
    """Measures decoding from a file and each server in turn."""
    speeds, loads, cores = list[float](), dict[str, list[Load]](), list[float]()
    for name in track([FILE, *urls] * arguments.passes, "throughput"):
        if name == FILE:
            speeds.append(alone.tokens_per_second())
            continue
        spent = time.process_time()
        loads.setdefault(name, []).append(asyncio.run(closed_loop(urls[name], bodies, arguments.clients)))
        if name == "saturated":
            cores.append((time.process_time() - spent) / loads[name][-1].seconds)
    say(FILE, {"tokens_per_second": median(speeds), "clients_cores": median(cores)})
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


def measure_loads(
    arguments: Arguments, server: Server, alone: Alone, bodies: Sequence[Body], say: Say
) -> None:
    """Measures the server at shares of the rate that saturates it: latency at 50% and 90% for at most a
    minute each, refusals at 120% for --minutes, and memory. Each is next to what a simulation predicts for
    the same arrivals. The speed of a machine changes within seconds, so each pass takes its part of the time,
    and what the simulation needs is measured before and after each load."""
    clients, passes, seconds = arguments.clients, arguments.passes, 60 * arguments.minutes
    seen, simulated, memory = ({name: list[Any]() for name in LOADS} for _ in range(3))
    twins = list[SimulatedServer]()
    pause = PAUSE * clients / asyncio.run(closed_loop(server.url, bodies, clients)).rate_of(clients)
    for seed in track(range(passes), "latency"):
        rate, before = measure_saturated(server, alone, bodies, clients, pause)
        twins.append(before)
        for name, share in LOADS.items():
            duration = (min(seconds, 60) if share < 1 else seconds) / passes
            arrivals = poisson_arrivals(share * rate, max(round(share * rate * duration), 1), seed)
            load, sizes = under_load(server, bodies, arrivals)
            rate, after = measure_saturated(server, alone, bodies, clients, pause)
            twins.append(after)
            seen[name].append(load)
            memory[name] += sizes
            simulated[name].append(alone.simulated(before.averaged(after), arrivals))
            before = after
    say("times", medians([twin.milliseconds for twin in twins]))
    for name in LOADS:
        say(name, merged(seen[name]).summary() | {"megabytes": memory[name]})
        say(f"{name}, simulated", medians(simulated[name]))
        pairs = zip(simulated[name], (load.summary() for load in seen[name]), strict=True)
        ratios = [quotients(*pair) for pair in pairs]
        say(f"{name}, simulated over measured", medians(ratios))
        say(
            f"{name}, each pass",
            {key: [round(ratio[key], 2) for ratio in ratios if key in ratio] for key in SHOWN},
        )


def measure_saturated(
    server: Server, alone: Alone, bodies: Sequence[Body], clients: int, pause: float
) -> tuple[float, SimulatedServer]:
    """The requests per second that saturate the server at the moment, and a server to simulate it by."""

    def measured(count: int, pause: float) -> Loop:
        load = asyncio.run(closed_loop(server.url, bodies, count, pause=pause))
        return Loop(count, pause, load.rate_of(count, pause))

    # With a queue, several rounds are one step; without one, each is. Requests that arrive at random, as
    # under load, cost more than requests that follow answers at once.
    loops = {"request_seconds": measured(clients, pause), "step_seconds": measured(alone.rows, 0.0)}
    bare = alone.server(server.queue, ROUNDS)
    return loops["request_seconds"].rate, fitted(bare, alone.rounds, loops, alone.widths)


def under_load(
    server: Server, bodies: Sequence[Body], arrivals: Float[np.ndarray, " N"]
) -> tuple[Load, list[int]]:
    """What clients that arrive at these times see, and the server's megabytes meanwhile."""
    memory = list[int]()
    load = open_loop(
        server.url,
        lambda number: bodies[number % len(bodies)],
        arrivals.tolist(),
        watch=lambda: memory.append(round(server.megabytes())),
    )
    return asyncio.run(load), memory


def medians(summaries: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The median of each figure that all have."""
    keys = [key for key in summaries[0] if all(figures.get(key) is not None for figures in summaries)]
    return {key: median(figures[key] for figures in summaries) for key in keys}


def quotients(predicted: dict[str, Any], measured: dict[str, Any]) -> dict[str, float]:
    """Prediction over measurement of each positive figure."""
    return {key: value / measured[key] for key, value in predicted.items() if value and measured[key]}


def blocks_by_load(
    arguments: Arguments, run: DecodeConfig, texts: Sequence[str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Runs load_blocks.compared() for each batch size, losslessly, so that all outputs have one
    distribution."""
    cascade, figures = Cascade.from_config(run), dict[str, Any]()
    settings = dataclasses.replace(run.settings, method="speculative", alpha=0.0, alpha_after={})
    for count in arguments.by_load:
        figures[str(count)] = of_rows = compared(cascade, settings, count, texts, arguments.passes, say)
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
