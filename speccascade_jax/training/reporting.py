"""Reports a training run: metrics.jsonl, a progress line, TensorBoard and a loss curve."""

import contextlib
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from speccascade_jax.inference.progress import duration


def read_events(path: Path, last_step: int | None = None) -> list[dict[str, Any]]:
    """The events of a metrics.jsonl file up to `last_step`. Drops incomplete lines of an interrupted run, and
    lines that are not events."""
    events = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if (
                isinstance(event, dict)
                and isinstance(event.get("step"), int)
                and "event" in event
                and (last_step is None or event["step"] <= last_step)
            ):
                events.append(event)
    return events


def portable(value: Any) -> Any:
    """`value` with absolute paths shortened to their last two parts, because logs are published with
    weights."""
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, str) and Path(value).is_absolute():
        return "/".join(Path(value).parts[-2:])
    return value


class Reporter:
    """Writes <run>/metrics.jsonl, one event per line. A resumed run drops the events after its step, which it
    will report again.

    A `quiet` reporter, as in every process except the first, prints and writes nothing.
    """

    def __init__(self, run: Path, step: int, steps: int, *, quiet: bool = False):
        self.console = Console(stderr=True, highlight=False, markup=False, emoji=False, quiet=quiet)
        self.steps, self.file, self.board = steps, None, None
        self.began, self.first = time.monotonic(), step
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("step {task.completed}/{task.total}"),
            TimeRemainingColumn(),
        )
        self.bar = Progress(
            *columns, console=self.console, transient=True, disable=quiet or not self.console.is_terminal
        )
        self.task = self.bar.add_task("compiling", total=steps, completed=step)
        if quiet:
            return
        kept = read_events(run / "metrics.jsonl", step) if step else []
        beside = run / "metrics.jsonl.part"  # renamed once complete: a kill here must not lose the log
        beside.write_text("".join(json.dumps(event) + "\n" for event in kept))
        beside.rename(run / "metrics.jsonl")
        self.file = (run / "metrics.jsonl").open("a")
        if importlib.util.find_spec("tensorboardX"):
            from tensorboardX import SummaryWriter

            self.board = SummaryWriter(str(run / "tensorboard"), purge_step=step)

    def __enter__(self) -> "Reporter":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        for sink in (self.file, self.board):
            if sink is not None:
                sink.close()

    def record(self, event: str, step: int, **values: Any) -> None:
        shown = "  ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in values.items()
            if not isinstance(value, dict)
        )
        if event == "log" and self.console.is_terminal:
            self.bar.update(self.task, completed=step, description=shown)
        else:
            left = f"  {self.left(step)}" if event == "log" else ""
            self.console.print(f"{event} at step {step} of {self.steps}: {shown}{left}", soft_wrap=True)
        if self.file is not None:
            self.file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
            self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, float):
                    self.board.add_scalar(f"{event}/{name}", value, step)

    def left(self, step: int) -> str:
        """The estimated time of the remaining steps, including evaluations and saves."""
        seconds = (time.monotonic() - self.began) / max(step - self.first, 1)
        return f"about {duration(seconds * (self.steps - step))} left"


def loss_curve(run: Path) -> None:
    """Draws <run>/loss.png: training and validation loss, and validation quality, by step."""
    from matplotlib.figure import Figure  # imported here because it takes a second

    events = read_events(run / "metrics.jsonl")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(run.name, parse_math=False)  # a name may contain a dollar sign
    lines = []
    for kind, label, style in (
        ("log", "training", {"color": "C0", "lw": 1}),
        ("evaluation", "validation", {"color": "C1", "marker": "o"}),
    ):
        points = [(e["step"], e["loss"]) for e in events if e["event"] == kind]
        if points:
            lines += axes.plot(*zip(*points, strict=True), label=label, **style)
    quality = [(e["step"], e["quality"], e["metric"]) for e in events if e.get("quality") is not None]
    if quality:
        steps, values, names = zip(*quality, strict=True)
        right = axes.twinx()
        right.set_ylabel(f"validation {names[-1]}")
        lines += right.plot(steps, values, color="C2", marker="s", ls="--", label=names[-1])
    axes.legend(handles=lines, loc="center right")
    axes.grid(alpha=0.3)
    figure.savefig(run / "loss.png", dpi=150)
