"""Runs the experiments behind docs/results and regenerates their tables and figures.

    python scripts/report.py --list
    python scripts/report.py                    # all experiments, for hours
    python scripts/report.py lossless lookup    # experiments, or pages
    python scripts/report.py lossless --quick   # a trial outside docs/results

Measurements are kept in --output, and the same command resumes from there. A complete experiment writes
docs/results/NAME.json and regenerates the page's tables and figures.
"""

import dataclasses
import datetime
import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from speccascade_jax.commands.commandline import at_least, console, exit_code, parsed
from speccascade_jax.config import PACKAGE
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation import records
from speccascade_jax.evaluation.pictures import draw
from speccascade_jax.experiments.findings import Bench, Experiment, Findings
from speccascade_jax.experiments.table import EXPERIMENTS
from speccascade_jax.inference.outputs import append_line, write_whole

DOCS = PACKAGE.parent / "docs"
RUNS = "runs.jsonl"
"""The file with the dates, machines and commits of an experiment's measurements."""
QUICK = {"inputs": 4, "timed": 2, "seeds": 1, "trials": 1, "steps": 4, "choices": 2}
"""The sizes of --quick."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Experiments to run, or results pages whose experiments to run. Default: everything that can run
    here."""
    list: Annotated[bool, tyro.conf.arg(name="list")] = False
    """List the experiments, and exit."""
    limit: int | None = None
    """Run a small trial with at most this many inputs."""
    quick: bool = False
    """Run an even smaller trial to check that everything works: a few inputs and steps, one seed, one trial,
    and two entries of each list of settings."""
    output: str = "runs/report"
    """The folder for measurements, and for the records and figures of trials."""


def chosen(names: Sequence[str]) -> list[Experiment]:
    """The experiments with these names, or with records of these names; all experiments without names."""
    experiments: dict[str, Experiment] = {}
    for name in names or EXPERIMENTS:
        several = {e.name: e for e in EXPERIMENTS.values() if name in (e.name, e.record)}
        if not several:
            raise FieldError(
                "names", name, f"known: {', '.join(EXPERIMENTS)}.", f"there is no experiment {name!r}"
            )
        experiments |= several
    return list(experiments.values())


def show_list(screen: Console) -> None:
    indent = " " * 4
    for experiment in EXPERIMENTS.values():
        missing = lacking(experiment)
        said = [experiment.summary, f"Page: {experiment.record}."]
        said += [f"Cannot run here: {missing}"] if missing else []
        text = textwrap.fill(
            " ".join(said),
            screen.width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
        )
        screen.print(f"{experiment.name}\n{text}", soft_wrap=True)


def lacking(experiment: Experiment) -> str | None:
    """A sentence on what prevents an experiment from running here; None if it can run."""
    try:
        experiment.measurement.check()
    except ValueError as error:
        return str(error)
    return None


def source(experiment: Experiment, runs: Sequence[dict[str, Any]], flags: str) -> dict[str, Any]:
    """The entry of an experiment's record on how it was measured."""
    seen = {field: list(dict.fromkeys(run[field] for run in runs)) for field in ("commit", "machine", "date")}
    loads = [run["load"] for run in runs]
    return {
        "summary": experiment.summary,
        "command": f"python scripts/report.py {experiment.name}{flags}",
        **{
            field: values[0] if len(values) == 1 else ", ".join(map(str, values))
            for field, values in seen.items()
        },
        "load": f"{min(loads):.1f} to {max(loads):.1f}",
        "settings": dataclasses.asdict(experiment.measurement),
    }


def run(experiment: Experiment, place: Path, screen: Console, flags: str) -> tuple[Findings, dict[str, Any]]:
    """Runs an experiment, keeps its measurements in `place`, and returns its findings and how it was
    measured."""
    place.mkdir(parents=True, exist_ok=True)
    now = {
        "commit": records.commit(),
        "machine": records.machine(),
        "date": today(),
        "load": os.getloadavg()[0],
    }
    kept, before = place / RUNS, measured(place)
    earlier = kept.read_text(encoding="utf-8") if kept.exists() else ""
    append_line(kept, now)  # before measuring, which may be interrupted
    findings = experiment.measurement.measure(Bench(place, screen))
    if earlier and measured(place) == before:  # everything was measured before
        write_whole(kept, earlier)
    runs = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    return findings, source(experiment, runs, flags)


def today() -> str:
    return datetime.date.today().isoformat()


def measured(place: Path) -> dict[Path, int]:
    """The sizes of the files of an experiment's measurements."""
    return {path: path.stat().st_size for path in place.rglob("*") if path.is_file() and path.name != RUNS}


def keep(
    experiment: Experiment,
    findings: Findings,
    about: dict[str, Any],
    folder: Path,
    pictures: Path,
    screen: Console,
) -> None:
    """Writes the record, the page's tables and the figures."""
    path = folder / f"{experiment.record}.json"
    before = records.read_record(path) if path.exists() else None
    about = {**about, "pictures": list(findings.pictures)}
    record = records.merged(before, experiment.name, about, findings.tables)
    pictures.mkdir(parents=True, exist_ok=True)
    files = [pictures / f"{name}.png" for name in findings.pictures]
    for file, figure in zip(files, findings.pictures.values(), strict=True):
        figure.savefig(file, dpi=150)
    write_whole(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    page, beside = path.with_suffix(".md"), os.path.relpath(pictures, folder)
    if page.exists() and folder == DOCS / "results":  # it has hand-written text
        text = records.redrawn(page.read_text(encoding="utf-8"), record)
    else:
        text = records.drafted(record, beside)
    write_whole(page, text)
    for written in (path, page, *files, *draw(record, pictures)):
        screen.print(f"written: {os.path.relpath(written)}", soft_wrap=True)
    for place in records.places(record, beside):
        if place not in text:
            screen.print(f"{os.path.relpath(page)} lacks {place}", soft_wrap=True)


def folders(arguments: Arguments) -> tuple[Path, Path, Path]:
    """The folders of measurements, records and figures; those of trials are never in the documentation."""
    output = Path(arguments.output)
    if arguments.quick or arguments.limit is not None:
        trial = output / ("quick" if arguments.limit is None else f"limit-{arguments.limit}")
        return trial, trial, trial
    if not (DOCS / "results").is_dir():  # an installed package
        return output, output, output
    return output, DOCS / "results", DOCS / "pictures"


def report(arguments: Arguments) -> None:
    screen = console()
    if arguments.list:
        show_list(screen)
        return
    at_least(1, limit=arguments.limit)
    measurements, results, pictures = folders(arguments)
    limits, flags = (dict(QUICK), " --quick") if arguments.quick else ({}, "")
    if arguments.limit is not None:
        limits |= {"inputs": arguments.limit, "timed": arguments.limit}
        flags += f" --limit {arguments.limit}"
    for experiment in able(arguments.names, screen):
        screen.print(f"{experiment.name}: {experiment.summary}", soft_wrap=True)
        findings, about = run(experiment.smaller(**limits), measurements / experiment.name, screen, flags)
        keep(experiment, findings, about, results, pictures, screen)


def able(names: Sequence[str], screen: Console) -> list[Experiment]:
    """The chosen experiments that can run here. Raises ValueError if none can run, or for an experiment that
    is named itself and cannot."""
    experiments, refused = list[Experiment](), ""
    for experiment in chosen(names):
        missing = lacking(experiment)
        if missing is None:
            experiments.append(experiment)
            continue
        refused = f"{experiment.name} cannot run here: {missing}"
        if experiment.name in names:
            raise ValueError(refused)
        screen.print(f"skipped: {experiment.name}: {missing}", soft_wrap=True)
    if not experiments:
        raise ValueError(refused)
    return experiments


def parse(argv: list[str]) -> Arguments:
    return parsed(Arguments, argv, "report", __doc__)


def main(argv: list[str]) -> int:
    return exit_code(lambda: report(parse(argv)), "; the same command resumes where it stopped")
