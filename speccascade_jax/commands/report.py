"""The evidence: runs the experiments behind the pages of docs/results, and draws their tables and pictures.

    python scripts/report.py --list
    python scripts/report.py                          # all of them, which takes hours
    python scripts/report.py lossless verification    # experiments, or all of a page
    python scripts/report.py lossless --quick         # a small trial, which leaves docs/results as it is

What is measured is kept in --output, and the same command resumes there. A whole experiment writes
docs/results/NAME.json and draws the page's tables and pictures anew.
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

from speccascade_jax.commands.commandline import at_least, console, exit_code, program
from speccascade_jax.config import PACKAGE
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation import records
from speccascade_jax.experiments.findings import Bench, Experiment, Findings
from speccascade_jax.experiments.table import EXPERIMENTS
from speccascade_jax.inference.outputs import append_line, write_whole

DOCS = PACKAGE.parent / "docs"
RUNS = "runs.jsonl"
"""When, where and at which commits an experiment's measurements were made."""
QUICK = {"inputs": 4, "timed": 2, "seeds": 1, "trials": 1, "choices": 2}
"""How much --quick measures."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Experiments, or pages of docs/results, whose experiments run then. By default all that can run here."""
    list: Annotated[bool, tyro.conf.arg(name="list")] = False
    """List the experiments, and stop."""
    limit: int | None = None
    """A small trial: at most so many inputs."""
    quick: bool = False
    """A smaller trial: a few inputs, one seed, one trial, and two of each list of settings, to see that
    everything runs."""
    output: str = "runs/report"
    """The folder for what is measured, and for the records and pictures of trials."""


def chosen(names: Sequence[str]) -> list[Experiment]:
    """The experiments that `names` name, or whose record they name; all where there are none."""
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
        said += [f"It cannot run here: {missing}"] if missing else []
        text = textwrap.fill(
            " ".join(said),
            screen.width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
        )
        screen.print(f"{experiment.name}\n{text}", soft_wrap=True)


def lacking(experiment: Experiment) -> str | None:
    """What an experiment lacks to run here, in a sentence; None where it can run."""
    try:
        experiment.measurement.check()
    except ValueError as error:
        return str(error)
    return None


def source(experiment: Experiment, runs: Sequence[dict[str, Any]], flags: str) -> dict[str, Any]:
    """How an experiment's measurements were made, for its record."""
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
    """What an experiment finds, and how its measurements, which are kept in `place`, were made."""
    place.mkdir(parents=True, exist_ok=True)
    now = {
        "commit": records.commit(),
        "machine": records.machine(),
        "date": today(),
        "load": os.getloadavg()[0],
    }
    kept, before = place / RUNS, measured(place)
    earlier = kept.read_text(encoding="utf-8") if kept.exists() else ""
    append_line(kept, now)  # now, for the run may be killed
    findings = experiment.measurement.measure(Bench(place, screen))
    if earlier and measured(place) == before:  # all had been measured: this run has added nothing
        write_whole(kept, earlier)
    runs = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    return findings, source(experiment, runs, flags)


def today() -> str:
    return datetime.date.today().isoformat()


def measured(place: Path) -> dict[Path, int]:
    """The files of an experiment's measurements, and their sizes."""
    return {path: path.stat().st_size for path in place.rglob("*") if path.is_file() and path.name != RUNS}


def keep(
    experiment: Experiment,
    findings: Findings,
    about: dict[str, Any],
    folder: Path,
    pictures: Path,
    screen: Console,
) -> None:
    """Writes the record, the page's tables and the pictures."""
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
    if page.exists() and folder == DOCS / "results":  # somebody's sentences are in it
        text = records.redrawn(page.read_text(encoding="utf-8"), record)
    else:
        text = records.drafted(record, beside)
    write_whole(page, text)
    for written in (path, page, *files):
        screen.print(f"written: {os.path.relpath(written)}", soft_wrap=True)
    for place in records.places(record, beside):
        if place not in text:
            screen.print(f"{os.path.relpath(page)} does not show {place}", soft_wrap=True)


def folders(arguments: Arguments) -> tuple[Path, Path, Path]:
    """Where measurements, records and pictures go: those of trials never to the documentation."""
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
    """Those of the chosen experiments that can run here. Raises ValueError for one that is named itself and
    cannot, and where none can."""
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
    return tyro.cli(Arguments, args=argv, prog=program("report"), description=__doc__)


def main(argv: list[str]) -> int:
    return exit_code(lambda: report(parse(argv)), "; the same command resumes where it stopped")
