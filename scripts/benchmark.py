"""How much faster is a cascade than its verifier? Both on the same inputs, in turn, one at a time.

    python scripts/benchmark.py --input ../shared/data/tatoeba_en_de/test.jsonl.gz --join 4

Inputs whose verifier output is shorter than --min-tokens are left out. Compilation comes first
and is not timed. Seconds are those of the compiled call: prefill and every round.
"""

import dataclasses
import json
import platform
import sys
from pathlib import Path

import jax
import numpy as np
import tyro
from decode import table_of
from rich.console import Console
from rich.progress import track

from speccascade_jax import config as configs
from speccascade_jax.commandline import exit_code
from speccascade_jax.config import DecodeConfig, Task
from speccascade_jax.data import joined_examples
from speccascade_jax.metrics import position_acceptance, relative_cost, summarize
from speccascade_jax.text import Cascade, Output


@dataclasses.dataclass(frozen=True)
class Arguments:
    input: str
    """Inputs: .jsonl with a field `source`, gzipped or not."""
    config: str = "demo"
    """A name in configs/ or the path of such a file."""
    join: int = 1
    """One to this many inputs are joined into one, at random, as the demo pair was trained."""
    limit: int = 300
    """Inputs to read."""
    min_tokens: int = 20
    """Shortest verifier output that counts."""
    method: str = "speculative"
    """The method that is timed against the verifier."""
    alpha: float = 0.0
    """Its lenience."""
    block_sizes: tuple[int, ...] = (1, 3, 5, 7)
    """The gammas to time."""
    temperature: float = 0.0
    """0 is greedy."""
    dtype: str | None = None
    """float32 or bfloat16, of weights and products (the config's own)."""
    output: str | None = None
    """Write one JSON line for each gamma here."""


def timed(cascade: Cascade, text: str, index: int, **options) -> tuple[float, Output]:
    before = cascade.clock.decode_seconds
    output = next(iter(cascade.generate([text], first_index=index, **options)))
    return cascade.clock.decode_seconds - before, output


def slope(counts: list[int], seconds: list[float]) -> float:
    """Seconds a step, by least squares over inputs: what is left after the prefill is taken off."""
    return float(np.polyfit(counts, seconds, 1)[0])


def quartiles(values: list[float]) -> str:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.2f} ({low:.2f} .. {high:.2f})"


def benchmark(arguments: Arguments) -> None:
    run: DecodeConfig = configs.load(arguments.config)
    run = dataclasses.replace(run, dtype=arguments.dtype or run.dtype)
    cascade, console = Cascade.from_config(run), Console(highlight=False)
    task = Task(arguments.input, arguments.input, arguments.input, join=arguments.join)
    texts = [source for source, _ in joined_examples(task, arguments.input)][:arguments.limit]
    lengths = map(len, cascade.encode(texts, truncate=True)[0])
    texts = [t for t, n in zip(texts, lengths, strict=True) if n < cascade.max_source_length]

    sweep = {"temperature": arguments.temperature, "alpha": arguments.alpha}
    contestants = {"verifier": {"method": "verifier"}, "drafter": {"method": "drafter"}} | {
        f"gamma {g}": {"method": arguments.method, "block_size": g, **sweep} for g in arguments.block_sizes}
    contestants["verifier"] |= {"temperature": arguments.temperature}
    contestants["drafter"] |= {"temperature": arguments.temperature}
    for options in track(contestants.values(), "compiling", transient=True):
        for n in {cascade.bucket(len(row)): n for n, row in enumerate(cascade.encode(texts)[0])}.values():
            timed(cascade, texts[n], 0, **options)

    seconds = {name: [] for name in contestants}
    outputs: dict[str, list[Output]] = {name: [] for name in contestants}
    names = list(contestants)
    for index, text in enumerate(track(texts, "timing", transient=True)):
        measured = {}
        for name in names[index % len(names):] + names[:index % len(names)]:  # nobody is always first
            measured[name] = timed(cascade, text, index, **contestants[name])
        if len(measured["verifier"][1].tokens) >= arguments.min_tokens:
            for name, (spent, output) in measured.items():
                seconds[name].append(spent)
                outputs[name].append(output)

    kept = len(seconds["verifier"])
    if kept < 2:
        raise ValueError(f"only {kept} inputs have outputs of {arguments.min_tokens} tokens or more: raise "
                         "--limit or --join.")
    step = {name: slope([len(o.tokens) for o in outputs[name]], seconds[name])
            for name in ("verifier", "drafter")}
    machine = {"device": str(jax.devices()[0]), "machine": platform.machine(), "jax": jax.__version__}
    console.print(table_of({
        "inputs": kept,
        "mean verifier output, tokens": float(np.mean([len(o.tokens) for o in outputs["verifier"]])),
        "verifier step, ms": 1e3 * step["verifier"], "drafter step, ms": 1e3 * step["drafter"],
        "verifier step / drafter step": step["verifier"] / step["drafter"], "dtype": cascade.verifier.dtype,
        **machine}, "alone"))
    for gamma in arguments.block_sizes:
        name = f"gamma {gamma}"
        counts = [o.counts for o in outputs[name]]
        rates = summarize(counts)
        round_seconds = slope([c["rounds"] for c in counts], seconds[name])
        acceptance = position_acceptance([o.origin for o in outputs[name]])
        predicted = relative_cost(acceptance, gamma, step["drafter"] / step["verifier"])
        speedups = [v / s for v, s in zip(seconds["verifier"], seconds[name], strict=True)]
        figures = {
            "speedup, median (quartiles)": quartiles(speedups),
            "speedup, total": sum(seconds["verifier"]) / sum(seconds[name]),
            "acceptance_rate": rates["acceptance_rate"], "acceptance a tested position": acceptance,
            "tokens_per_verifier_call": rates["tokens_per_verifier_call"],
            "round, ms": 1e3 * round_seconds,
            "relative cost without prefill, measured":
                round_seconds / rates["tokens_per_verifier_call"] / step["verifier"],
            "relative cost without prefill, predicted": predicted}
        console.print(table_of(figures, f"{arguments.method}, {name}, temperature {arguments.temperature}"))
        if arguments.output is not None:
            with Path(arguments.output).open("a") as file:
                line = {"gamma": gamma, "method": arguments.method, **figures, **machine}
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(exit_code(lambda: benchmark(tyro.cli(Arguments, description=__doc__))))
