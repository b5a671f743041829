"""Quality against latency: every method at every lenience on a task, in a table and in pictures.

    python scripts/tradeoff.py --config=demo --temperatures 0 1 --output sweep
    python scripts/tradeoff.py --config=demo --output sweep --at-quality=verifier --pick picked.py
    python scripts/decode.py --config=picked.py

A killed sweep goes on with the same command.
"""

import dataclasses
from pathlib import Path

import numpy as np
import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import track
from rich.table import Table

from speccascade_jax import config as configs
from speccascade_jax.commands.commandline import config_of, exit_code, task_of
from speccascade_jax.config import DecodeConfig, Task
from speccascade_jax.evaluation import plots as figures
from speccascade_jax.evaluation import sweep as tradeoff
from speccascade_jax.evaluation.sweep import MODELS, OneShape, Point, Result
from speccascade_jax.inference.text import Cascade
from speccascade_jax.parallel import local_mesh
from speccascade_jax.training.data import joined_examples

# Fields of a config that a sweep sets itself, or that change no result.
SWEPT = ("method", "alpha", "block_size", "temperature", "top_p", "batch_size", "truncate", "task",
         "missing", "examples")


@dataclasses.dataclass(frozen=True)
class Arguments:
    run: tyro.conf.OmitArgPrefixes[DecodeConfig]
    config: str = "demo"
    """A name in configs/ or the path of such a file; its fields are the defaults of all other flags."""
    task: str | None = None
    """A training config, whose task this is (the one that the config names)."""
    output: str = "tradeoff"
    """The folder of the results, the table and the pictures; a sweep goes on where it ends."""
    split: str = "validation"
    """train, validation or test."""
    methods: tuple[str, ...] = tradeoff.COMPARED
    """The verifier and the drafter alone are always there."""
    alphas: tuple[float, ...] = tuple(n / 10 for n in range(11))
    """Leniences in [0, 1]; BiLD's thresholds are ten times as large."""
    gammas: tuple[int, ...] = (5,)
    """Block sizes, of methods that have one."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """0 is greedy."""
    top_ps: tuple[float, ...] = (1.0,)
    """1 keeps all tokens."""
    join: int | None = None
    """One to this many examples are joined into one (the task's own number)."""
    limit: int | None = None
    """Decode only the first so many examples for quality."""
    timed: int = 100
    """Time so many random examples at batch 1; 0 for no timing (and no table)."""
    trials: int = 3
    """Times each is decoded by every point."""
    at_quality: str | None = None
    """Pick the fastest point of at least this quality: a number, or `verifier`."""
    at_latency: float | None = None
    """Pick the best point that takes at most this share of the verifier's time."""
    pick: str = "picked.py"
    """The config file to write for it."""
    check: bool = True
    """Decode and time the pick on the test split, and say what came of its promise."""


def show_table_two(found: list[Result], metric: str, console: Console) -> None:
    """The paper's Table 2, its two parts for each temperature and top-p."""
    for (temperature, top_p), methods in tradeoff.table_two(found).items():
        verifier = next(r for r in found if r.point == Point("verifier", 0.0, 0, temperature, top_p))
        where = f"temperature {temperature:g}" + (f", top-p {top_p:g}" if top_p else "")
        fastest = _table(f"{where}: fastest at the verifier's {metric}, {verifier.quality:.2f}",
                         "times as fast (95%)", "predicted")
        best = _table(f"{where}: best within the verifier's time", metric, "over the verifier (95%)", "time",
                      "predicted")
        for method, (fast, good) in methods.items():
            row = [method, *"----"]
            if fast is not None:
                low, high = fast.latency_interval
                row[1:] = [*_setting(fast.point), f"{1 / fast.latency:.2f} ({1 / high:.2f} to {1 / low:.2f})",
                           f"{1 / fast.predicted:.2f}"]
            fastest.add_row(*row)
            row = [method, *"------"]
            if good is not None:
                gain = good.quality - verifier.quality
                row[1:] = [*_setting(good.point), f"{good.quality:.2f}",
                           f"{gain:+.2f} ({good.gain[0]:+.2f} to {good.gain[1]:+.2f})",
                           f"{good.latency:.2f}", f"{good.predicted:.2f}"]
            best.add_row(*row)
        console.print(fastest, best)


def _table(title: str, *columns: str) -> Table:
    return Table("method", "alpha", "gamma", *columns, title=title, title_justify="left")


def _setting(point: Point) -> tuple[str, str]:
    return f"{point.alpha:g}", str(point.gamma or "-")


def show_points(found: list[Result], metric: str, console: Console) -> None:
    """Every point: what was measured, beside what was predicted."""
    table = Table("method", "alpha", "gamma", "temp.", "top-p", metric, "over the verifier (95%)",
                  "time (95%)", "predicted", "deferred", "rejected", "calls a token")
    for r in found:
        time = ("-" if r.latency is None else
                "{:.2f} ({:.2f} to {:.2f})".format(r.latency, *r.latency_interval))
        table.add_row(*("-" if x is None else str(x) for x in dataclasses.astuple(r.point)),
                      f"{r.quality:.2f}", "{:+.2f} to {:+.2f}".format(*r.gain), time, *(
                          "-" if x is None else f"{x:.2f}"
                          for x in (r.predicted, r.deferral_rate, r.rejection_rate, r.calls_per_token)))
    console.print(table)


class Sweep:
    """The measurements of one split: quality batched, latency one at a time."""

    def __init__(self, arguments: Arguments, task: Task, split: str, folder: Path, console: Console):
        self.arguments, self.task, self.folder, self.console = arguments, task, folder, console
        run = arguments.run
        self.examples = joined_examples(task, getattr(task, split))[:arguments.limit]
        if not self.examples:
            raise ValueError(f"the {split} split is empty: raise --limit or name another --split.")
        self.settings = {name: value for name, value in dataclasses.asdict(run).items() if name not in SWEPT}
        self.settings |= {"split": split, "join": task.join, "metric": task.metric,
                          "examples": len(self.examples)}

    def measure(self, points: list[Point]) -> list[Result]:
        run, metric = self.arguments.run, self.task.metric
        sources, references = zip(*self.examples, strict=True)
        shared = {"seed": run.seed, "top_k": run.top_k}
        batched = self._padded_alike(sources, local_mesh())
        qualities = tradeoff.measure_quality(
            batched, points, sources, references, metric, self.folder / "quality.jsonl", self.settings,
            shared=shared, batch_size=run.batch_size, track=self._track)
        self._say("quality", batched, points)
        latencies = {}
        if self.arguments.timed:
            chosen = np.random.default_rng(run.seed).permutation(len(sources))[:self.arguments.timed]
            timed = [sources[n] for n in chosen]
            single = self._padded_alike(timed, None)
            latencies = tradeoff.measure_latency(
                single, points, timed, self.folder / "latency.jsonl",
                {**self.settings, "timed": self.arguments.timed, "trials": self.arguments.trials},
                shared=shared, trials=self.arguments.trials, track=self._track)
            self._say("latency", single, points)
        return tradeoff.results(metric, qualities, latencies)

    def _padded_alike(self, sources: list[str], mesh: Mesh | None) -> OneShape:
        """The cascade, at the one source length that all of `sources` need."""
        cascade = OneShape.from_config(self.arguments.run, mesh)
        longest = max(map(len, cascade.encode(sources, truncate=True)[0]))
        return dataclasses.replace(cascade, max_source_length=Cascade.bucket(cascade, longest))

    def _track(self, items, name):
        return track(items, name, console=self.console, transient=True)

    def _say(self, what: str, cascade: Cascade, points: list[Point]) -> None:
        clock, programs = cascade.clock, len({(p.method, p.gamma) for p in points})
        self.console.print(f"{what}: {len(points)} points of {programs} methods and gammas; "
                           f"{clock.compilations} programs compiled in {clock.compile_seconds:.0f} s, "
                           f"decoding {clock.decode_seconds:.0f} s.")


def pick(arguments: Arguments, task: Task, found: list[Result], console: Console) -> None:
    """Names the point, writes its config, and checks on the test split what it promises."""
    candidates = [r for r in found if r.point.method not in MODELS]
    target = arguments.at_quality
    if target is not None:
        choices = [tradeoff.fastest([r for r in candidates if r.point.alone("verifier") == v.point],
                                    v.quality if target == "verifier" else _number(target))
                   for v in found if v.point.method == "verifier"]
        chosen = min((r for r in choices if r is not None), key=lambda r: r.latency, default=None)
        wish = f"{task.metric} of at least {target}"
    else:
        chosen = tradeoff.best(candidates, arguments.at_latency)
        wish = f"at most {arguments.at_latency:g} of the verifier's time"
    if chosen is None:
        raise ValueError(f"no measured point has {wish}: ask for less, or sweep more methods and leniences.")
    promise = (f"{task.metric} {chosen.quality:.2f} in {chosen.latency:.2f} of the verifier's time "
               f"on {arguments.split}")
    path = Path(arguments.pick)
    run = dataclasses.replace(
        arguments.run, batch_size=configs.load(arguments.config).batch_size, **chosen.point.options())
    path.write_text(tradeoff.config_text(arguments.config, run, promise))
    console.print(f"picked for {wish}: [bold]{chosen.point}[/], temperature {chosen.point.temperature:g}: "
                  f"{promise}. Run it: python scripts/decode.py --config={path}")
    if arguments.check:
        name = "-".join(str(x) for x in ("test", *dataclasses.astuple(chosen.point)))
        sweep = Sweep(arguments, task, "test", Path(arguments.output) / name, console)
        measured = {r.point: r for r in sweep.measure([*map(chosen.point.alone, MODELS), chosen.point])}
        own, verifier = measured[chosen.point], measured[chosen.point.alone("verifier")]
        console.print(f"on test: {task.metric} {own.quality:.2f}, the verifier {verifier.quality:.2f} "
                      f"(difference {own.gain[0]:+.2f} to {own.gain[1]:+.2f}), in {own.latency:.2f} of its "
                      "time ({:.2f} to {:.2f}).".format(*own.latency_interval))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--at-quality is {text!r}; write a number or verifier.") from None


def sweep(arguments: Arguments) -> None:
    if arguments.at_quality is not None and arguments.at_latency is not None:
        raise ValueError("--at-quality and --at-latency exclude each other: give one.")
    if (arguments.at_quality or arguments.at_latency) and not arguments.timed:
        raise ValueError("nothing can be picked without latency: raise --timed.")
    console, folder = Console(highlight=False), Path(arguments.output)
    task = task_of(arguments.config, arguments.run, arguments.task, arguments.split, arguments.join)
    points = tradeoff.grid(arguments.methods, arguments.alphas, arguments.gammas, arguments.temperatures,
                           [None if p == 1 else p for p in arguments.top_ps])
    found = Sweep(arguments, task, arguments.split, folder, console).measure(points)
    show_table_two(found, task.metric, console)
    with (folder / "table.txt").open("w") as file:
        wide = Console(file=file, width=150)
        show_table_two(found, task.metric, wide)
        show_points(found, task.metric, wide)
    console.print(f"every point: {folder / 'table.txt'}")
    for path in figures.draw(found, task.metric, folder):
        console.print(f"drawn: {path}")
    if arguments.at_quality is not None or arguments.at_latency is not None:
        pick(arguments, task, found, console)


def parse(argv: list[str]) -> Arguments:
    name, run = config_of(argv, DecodeConfig, "demo")
    return tyro.cli(Arguments, default=Arguments(dataclasses.replace(run, batch_size=32), name), args=argv,
                    prog="tradeoff.py", description=__doc__)


def main(argv: list[str]) -> int:
    return exit_code(lambda: sweep(parse(argv)), "; the same command goes on where it stopped")
