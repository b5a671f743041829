"""Sweeps methods and leniences on a task, and shows quality against time in a table and in plots.

    python scripts/tradeoff.py --config=demo --methods speculative opt \\
        --limit 200 --at-quality=verifier --output sweep
    python scripts/decode.py --config=picked.py

With all methods and a whole split, a sweep takes hours. If it is interrupted, the same command resumes it.
"""

import dataclasses
import io
import math
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from speccascade_jax import config as configs
from speccascade_jax.commands.commandline import (
    at_least,
    at_most,
    called,
    config_of,
    console,
    exit_code,
    parsed,
    task_of,
)
from speccascade_jax.config import DecodeConfig, Task
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.samplers.named import SINGLE_MODEL
from speccascade_jax.core.transforms import TRUNCATIONS
from speccascade_jax.core.verification import VERIFICATIONS
from speccascade_jax.evaluation import plots
from speccascade_jax.evaluation.measurements import Measurements
from speccascade_jax.evaluation.reductions import Comparison, best, fastest, is_largest, table_two
from speccascade_jax.evaluation.sweep import COMPARED, alone, block_size_of, grid
from speccascade_jax.inference.outputs import check_targets, write_whole
from speccascade_jax.inference.vocabulary_checks import check_methods
from speccascade_jax.settings import NAMED, named

PICKED = "Picked by scripts/tradeoff.py"
QUALITIES = ("verifier", "truncated")
# The fields that a sweep varies.
POINT = ("method", "alpha", "alpha_after", "block_size", "verification", "temperature", *TRUNCATIONS)


@dataclasses.dataclass(frozen=True)
class Arguments:
    run: tyro.conf.OmitArgPrefixes[DecodeConfig]
    config: str = "demo"
    """A config name or path. Its fields are the defaults of the other flags."""
    task: str | None = None
    """The training config that defines the task. Default: the task of --config."""
    output: str = "tradeoff"
    """The folder for results, table and plots. If it holds a sweep, the sweep resumes."""
    split: str = "validation"
    """The split to sweep on: train, validation or test."""
    methods: tuple[str, ...] = COMPARED
    """Methods to sweep. The verifier and the drafter alone are always included."""
    alphas: tuple[float, ...] | None = None
    """Leniences to sweep, in [0, 1]. Default: tenths, with finer steps where a method changes quickly. For
    methods with unbounded thresholds, such as BiLD, they are multiplied by the method's scale."""
    alphas_after: tuple[float, ...] | None = None
    """Leniences to sweep after the markers of --alpha-after, each combined with every one of --alphas before
    the marker. Default: those of --alpha-after."""
    verifications: tuple[Literal[*VERIFICATIONS], ...] | None = None  # type: ignore[valid-type]
    """Ways of verifying drafts to sweep. Default: --verification."""
    block_sizes: tuple[int | Literal["adaptive"], ...] | None = None
    """Block sizes to sweep, or `adaptive`. Default: 5; for hierarchies and adaptive blocks, --block-size."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Temperatures to sweep. 0 decodes greedily."""
    top_ps: tuple[float, ...] = (1.0,)
    """Values of top_p to sweep. 1 keeps all tokens."""
    truncations: Annotated[
        tuple[Literal[*TRUNCATIONS], ...],  # type: ignore[valid-type]
        tyro.conf.arg(metavar="[NAME [NAME ...]]"),
    ] = tuple(TRUNCATIONS)
    """Truncations to sweep for the verifier and the lossless cascade; each becomes a curve."""
    join: int | None = None
    """Join between one and this many examples into one. Default: the task's number."""
    limit: int | None = None
    """The number of examples to score quality on, from the first one on. Default: all."""
    timed: int = 100
    """The number of random examples to time at batch size 1. 0 times nothing and prints no table."""
    trials: int = 3
    """The number of times that every point decodes each timed example."""
    at_quality: str | None = None
    """Pick the fastest point with at least this quality: a number, `verifier`, or `truncated` for the
    verifier's quality under the best truncation of the sweep."""
    at_latency: float | None = None
    """Pick the point with the best quality within this fraction of the verifier's time."""
    pick: str = "picked.py"
    """The config file to write for the picked point."""
    check: bool = True
    """Decode and time the picked point on the test split, and compare with its figures on validation."""


def show_table_two(comparisons: list[Comparison], metric: str, screen: Console) -> None:
    """Prints the two parts of the paper's Table 2, for each temperature and top-p."""
    for (temperature, top_p), methods in table_two(comparisons).items():
        verifier = next(
            r
            for r in comparisons
            if r.is_verifier and (r.point.temperature, r.point.top_p) == (temperature, top_p)
        )
        where = f"temperature {temperature:g}" + (f", top-p {top_p:g}" if top_p else "")
        quickest = _table(
            f"{where}: fastest at the verifier's {metric}, {verifier.quality:.2f}",
            "speedup (95%)",
            "predicted",
        )
        highest = _table(
            f"{where}: best within the verifier's time",
            metric,
            "over the verifier (95%)",
            "time",
            "predicted",
        )
        for method, (fast, good) in methods.items():
            row = [method, *"----"]
            if fast is not None and fast.time is not None:
                share, (low, high), predicted = fast.time
                row[1:] = [
                    *_setting(fast),
                    f"{1 / share:.2f} ({1 / high:.2f} to {1 / low:.2f})",
                    f"{1 / predicted:.2f}",
                ]
            quickest.add_row(*row)
            row = [method, *"------"]
            if good is not None and good.time is not None:
                gain = good.quality - verifier.quality
                row[1:] = [
                    *_setting(good),
                    f"{good.quality:.2f}",
                    f"{gain:+.2f} ({_difference(good.gain)})",
                    f"{good.time.share:.2f}",
                    f"{good.time.predicted:.2f}",
                ]
            highest.add_row(*row)
        screen.print(quickest, highest)
        if not any(faster_than_the_verifier(fast) for fast, _ in methods.values()):
            screen.print(
                f"{where}: no method is significantly faster than the verifier at its {metric}. Decode with "
                "the verifier alone, or accept a lower quality.",
                soft_wrap=True,
            )


def faster_than_the_verifier(r: Comparison | None) -> bool:
    """Whether the 95% interval of a point's time is entirely below the verifier's time."""
    return r is not None and r.time is not None and r.time.interval[1] < 1


def _table(title: str, *columns: str) -> Table:
    return Table("method", "alpha", "block size", *columns, title=title, title_justify="left")


def _setting(r: Comparison) -> tuple[str, str]:
    return f"{r.lenience:g}", str(block_size_of(r.point) or "-")


def _fields(r: Comparison) -> tuple[Any, ...]:
    """The fields that a sweep varies."""
    return r.name, r.lenience, block_size_of(r.point), r.point.temperature, r.point.top_p


def _difference(interval: tuple[float, float]) -> str:
    return "{:+.2f} to {:+.2f}".format(*interval)


def show_points(comparisons: list[Comparison], metric: str, screen: Console) -> None:
    """Prints every point with its measurements and predictions."""
    table = Table(
        "method",
        "alpha",
        "block size",
        "temp.",
        "top-p",
        metric,
        "over the verifier (95%)",
        "over the drafter (95%)",
        "time (95%)",
        "predicted",
        "deferred",
        "rejected",
        "calls per token",
    )
    for r in comparisons:
        time = "{:.2f} ({:.2f} to {:.2f})".format(r.time.share, *r.time.interval) if r.time else "-"
        rates = r.time.predicted if r.time else None, r.deferral_rate, r.rejection_rate, r.calls_per_token
        table.add_row(
            *("-" if x is None else str(x) for x in _fields(r)),
            f"{r.quality:.2f}",
            _difference(r.gain),
            _difference(r.gain_over_drafter),
            time,
            *("-" if x is None else f"{x:.2f}" for x in rates),
        )
    screen.print(table)


def measurements_of(arguments: Arguments, task: Task, split: str, screen: Console) -> Measurements:
    return Measurements(
        arguments.run,
        task,
        split,
        limit=arguments.limit,
        timed=arguments.timed,
        trials=arguments.trials,
        screen=screen,
    )


def choose(arguments: Arguments, metric: str, comparisons: list[Comparison]) -> tuple[Comparison, str]:
    """The point that --at-quality or --at-latency selects, and the criterion in words."""
    candidates = [r for r in comparisons if r.point.method not in SINGLE_MODEL]
    goals = {v.panel: v.quality for v in comparisons if v.is_verifier}
    if arguments.at_latency is not None:
        chosen = best(candidates, arguments.at_latency)
        wish = f"at most {arguments.at_latency:g} of the verifier's time"
    else:
        target = arguments.at_quality or ""
        if target == "truncated":
            goals = {
                panel: max(r.quality for r in comparisons if is_largest(r.point.name) and r.panel == panel)
                for panel in goals
            }
        choices = [
            fastest(
                [r for r in candidates if r.panel == panel], goal if target in QUALITIES else float(target)
            )
            for panel, goal in goals.items()
        ]
        chosen = fastest([r for r in choices if r is not None], -math.inf)
        wish = f"{metric} of at least {target}"
    if chosen is None:
        field = "at_quality" if arguments.at_latency is None else "at_latency"
        raise FieldError(
            field,
            getattr(arguments, field),
            "relax the criterion, or sweep more methods and leniences.",
            f"no measured point has {wish}",
        )
    return chosen, wish


def pick(
    arguments: Arguments,
    metric: str,
    comparisons: list[Comparison],
    test: Measurements | None,
    screen: Console,
) -> None:
    """Prints the selected point, writes its config, and measures it on `test`."""
    chosen, wish = choose(arguments, metric, comparisons)
    point = chosen.point
    quality = (
        f"{metric} {chosen.quality:.2f}"
        if chosen.verifier_quality is None
        else (f"the verifier's own distribution ({metric} {chosen.verifier_quality:.2f})")
    )
    promise = f"{quality} in {_time(chosen)} on {arguments.split}"
    run = dataclasses.replace(
        arguments.run,
        batch_size=configs.load(arguments.config).batch_size,
        **{name: getattr(point, name) for name in POINT},
    )
    write_config(Path(arguments.pick), arguments.config, run, promise)
    screen.print(
        f"picked for {wish}: {chosen.name}, alpha {chosen.lenience:g}, block size "
        f"{block_size_of(point) or '-'}, temperature {point.temperature:g}: {promise}. Decode with it: "
        f"{called('decode')} --config={arguments.pick}"
    )
    _say_drafter(chosen, comparisons, screen)
    if test is not None:
        name = re.sub(r"[^\w.+-]+", "-", "-".join(str(x) for x in ("test", *_fields(chosen))))
        points = [*(alone(chosen.panel, model) for model in SINGLE_MODEL), point]
        measured = test.measure(points, Path(arguments.output) / name)
        tested, verifier = (next(r for r in measured if r.point == p) for p in (point, chosen.panel))
        screen.print(
            f"on test: {metric} {tested.quality:.2f}, against {verifier.quality:.2f} for the verifier "
            f"(difference {_difference(tested.gain)}), in {_time(tested)}."
        )
        _say_drafter(tested, measured, screen)


def _say_drafter(r: Comparison, comparisons: list[Comparison], screen: Console) -> None:
    """Prints the simplest alternative to the chosen setting: the drafter alone."""
    drafter = next(other for other in comparisons if other.point == alone(r.panel, "drafter"))
    screen.print(
        f"The drafter alone: {drafter.quality:.2f} (the pick differs from it by "
        f"{_difference(r.gain_over_drafter)}), in {_time(drafter)}."
    )


def _time(r: Comparison) -> str:
    return (
        "{:.2f} ({:.2f} to {:.2f}) of the verifier's time".format(r.time.share, *r.time.interval)
        if r.time
        else "an unmeasured time"
    )


def write_config(path: Path, config: str, run: DecodeConfig, promise: str) -> None:
    """Writes a config file: `config` with the point and the other changed fields of `run`."""
    loaded = configs.load(config)
    changed = [
        f"{field.name}={getattr(run, field.name)!r}"
        for field in dataclasses.fields(run)
        if field.name in POINT or getattr(run, field.name) != getattr(loaded, field.name)
    ]
    write_whole(
        path,
        f"# {PICKED} from {config!r}: {promise}.\n\n"
        "import dataclasses\n\nfrom speccascade_jax.config import load\n\n"
        f"config = dataclasses.replace(\n    load({config!r}),\n    " + ",\n    ".join(changed) + ")\n",
    )


def check(arguments: Arguments) -> None:
    """Raises ValueError for invalid arguments, before anything is read or written."""
    a = arguments
    at_least(1, trials=a.trials, limit=a.limit, batch_size=a.run.batch_size)
    at_least(0, timed=a.timed)
    at_most(1000, trials=a.trials)
    numbers = [size for size in a.block_sizes or () if isinstance(size, int)]
    at_most(a.run.max_new_tokens, block_sizes=max(numbers, default=1))  # no draft is longer than a text
    if a.at_quality is not None and a.at_latency is not None:
        raise FieldError(
            "at_latency", a.at_latency, "give one.", "--at-quality and --at-latency exclude each other"
        )
    if a.at_latency is not None and not 0 < a.at_latency < math.inf:
        raise FieldError("at_latency", a.at_latency, "give a fraction of the verifier's time above 0.")
    if a.at_quality not in (None, *QUALITIES) and not _finite(a.at_quality):
        raise FieldError("at_quality", a.at_quality, "give a number, verifier or truncated.")
    if a.at_quality is not None or a.at_latency is not None:
        if not a.timed:
            raise FieldError(
                "timed", a.timed, "raise --timed.", "a point can only be picked if times are measured"
            )
        check_pick(Path(a.pick), Path(a.output), a.config)


def _finite(text: str | None) -> bool:
    try:
        return math.isfinite(float(text or ""))
    except ValueError:
        return False


def check_pick(path: Path, folder: Path, config: str) -> None:
    """Raises ValueError if no config can be written to `path`, or it would replace another file."""
    if path.suffix != ".py":
        raise FieldError("pick", str(path), "a config file's name must end in .py.", f"--pick is {path}")
    if path.exists() or path.resolve().parent != folder.resolve():  # that one is made for the sweep
        check_targets({"--pick": path}, {"--config": configs.path_of(config), "--output": folder})
    if path.is_file() and not path.read_bytes().startswith(f"# {PICKED}".encode()):
        raise FieldError(
            "pick",
            str(path),
            "delete it or choose another name.",
            f"--pick is {path}, which this command did not write",
        )


def make_folder(folder: Path) -> None:
    """Raises ValueError if no file can be written in `folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise FieldError(
            "output",
            str(folder),
            "choose another folder.",
            f"--output is {folder}, which is not a writable folder ({error.strerror})",
        ) from None


def sweep(arguments: Arguments) -> None:
    check(arguments)
    block_sizes: Any = arguments.block_sizes
    if block_sizes is None:
        block_sizes = (5 if isinstance(arguments.run.block_size, int) else arguments.run.block_size,)
    points = grid(
        arguments.run.settings,
        arguments.methods,
        arguments.alphas,
        block_sizes,
        arguments.temperatures,
        [None if p == 1 else p for p in arguments.top_ps],
        arguments.truncations,
        {**NAMED, **named(arguments.run.samplers)},
        arguments.verifications,
        arguments.alphas_after,
    )
    check_methods(arguments.run, points)
    screen, folder = console(), Path(arguments.output)
    task = task_of(arguments.config, arguments.run, arguments.task, arguments.split, arguments.join)
    picks = arguments.at_quality is not None or arguments.at_latency is not None
    measurements = measurements_of(arguments, task, arguments.split, screen)
    test = measurements_of(arguments, task, "test", screen) if picks and arguments.check else None
    make_folder(folder)
    comparisons = measurements.measure(points, folder)
    show_table_two(comparisons, task.metric, screen)
    table = io.StringIO()
    wide = console(file=table, width=175)
    show_table_two(comparisons, task.metric, wide)
    show_points(comparisons, task.metric, wide)
    write_whole(folder / "table.txt", table.getvalue())
    screen.print(f"all points: {folder / 'table.txt'}")
    for path in plots.draw(comparisons, task.metric, folder):
        screen.print(f"plot: {path}")
    if picks:
        pick(arguments, task.metric, comparisons, test, screen)


def parse(argv: list[str]) -> Arguments:
    name, run = config_of(argv, DecodeConfig, "demo")
    default = Arguments(dataclasses.replace(run, batch_size=32), name)
    return parsed(Arguments, argv, "tradeoff", __doc__, default)


def main(argv: list[str]) -> int:
    return exit_code(lambda: sweep(parse(argv)), "; the same command resumes where it stopped")
