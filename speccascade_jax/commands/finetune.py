"""Trains the model of a config, from scratch or from a checkpoint, or the router or learned mixture of a
pair.

    python scripts/finetune.py --config=demo_verifier
    python scripts/finetune.py --config=demo_router
    python scripts/finetune.py --config=demo_mixture

If a run is interrupted, the same command resumes from its last save. The best parameters are exported to
`export` in the run's folder; the weights bundled with the package change only with --ship.
"""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from speccascade_jax.cluster import connect
from speccascade_jax.commands.commandline import (
    TRAINED,
    called,
    config_of,
    console,
    exit_code,
    parsed,
    table_of_configs,
)
from speccascade_jax.commands.profiles import check_profile, profiled
from speccascade_jax.config import LearnedRuleConfig, TrainConfig, load, path_of
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation.quality import METRICS, replaced
from speccascade_jax.inference.outputs import check_targets, write_whole
from speccascade_jax.learned.rules import load as load_rule
from speccascade_jax.training.checks import check, check_folder, check_not_shipped, export_folders, shipped_at
from speccascade_jax.training.learned_rules import improves, train_rule
from speccascade_jax.training.loop import train

SHOWN = "demo_verifier"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments for training a model; every field of the config is a flag."""

    run: tyro.conf.OmitArgPrefixes[TrainConfig]
    config: str
    """A config name or path. Its fields are the defaults of the other flags."""
    cluster: str | None = None
    """Train with several processes: `auto` on TPU pods and Slurm, otherwise HOST:PORT,PROCESSES,NUMBER in
    each process."""
    list: Annotated[bool, tyro.conf.arg(name="list")] = False
    """List the training configs, and exit."""
    ship: bool = False
    """Also replace the weights of this name that are bundled with the package (speccascade_jax/demo)."""
    profile: str | None = None
    """A new folder for a trace of the run, which XProf, TensorBoard and Perfetto can open."""


@dataclasses.dataclass(frozen=True)
class LearnedRuleArguments:
    """Arguments for training a learned rule; every field of the config is a flag."""

    run: tyro.conf.OmitArgPrefixes[LearnedRuleConfig]
    config: str
    """A config name or path. Its fields are the defaults of the other flags."""
    ship: bool = False
    """Also replace the network of this name that is bundled with the package (speccascade_jax/demo)."""


def check_rule(config: str, run: LearnedRuleConfig, ship: bool) -> None:
    """Raises ValueError if the network cannot be written, or would replace another file."""
    run.check()
    output = Path(run.output)
    check_folder("output", str(output.parent))
    check_not_shipped("output", output)
    if output.exists():
        load_rule(output)  # raises for any other file
    if ship:
        shipped_at(run)
    output.parent.mkdir(parents=True, exist_ok=True)
    check_targets({"--output": output}, {"--config": path_of(config)})


def finetune_rule(config: str, run: LearnedRuleConfig, argv: list[str]) -> None:
    arguments = parsed(LearnedRuleArguments, argv, "finetune", __doc__, LearnedRuleArguments(run, config))
    run = arguments.run
    check_rule(config, run, arguments.ship)
    screen = console()
    figures = train_rule(run, replaced)
    for what, figure in figures.items():
        screen.print(f"on held-out texts, {what}: {figure:.4f}")
    if not improves(figures):
        worse = f"on held-out texts this {run.method} is no better than the rule it is meant to improve"
        if arguments.ship:
            raise FieldError("ship", True, "the bundled files were not replaced.", worse)
        screen.print(
            f"{worse}: decode without it. More examples (--examples) may help. For inspection, it was "
            f"written to {run.output}.",
            soft_wrap=True,
        )
        return
    if arguments.ship:
        write_whole(shipped_at(run), Path(run.output).read_text(encoding="utf-8"))
    screen.print(
        f"written: {run.output}. Decode with it: {called('decode')} --config={run.pair} "
        f"--method {run.method} --alpha 0.1 --router {run.output}",
        soft_wrap=True,
    )


def finetune(argv: list[str]) -> None:
    if "--list" in argv:
        console().print(table_of_configs(TRAINED, "--config"))
        return
    name, run = config_of(argv, TRAINED)
    if isinstance(run, LearnedRuleConfig):
        finetune_rule(name, run, argv)
        return
    about = __doc__
    if run is tyro.MISSING:  # of --help; without a config, no flag has a default
        run = load(SHOWN, TrainConfig)
        about = f"{__doc__}\nThe defaults shown are those of --config={SHOWN}.\n"
    arguments = parsed(Arguments, argv, "finetune", about, Arguments(run, name))
    metric = arguments.run.task.metric
    if metric not in METRICS:
        raise FieldError("metric", metric, f"known: {', '.join(METRICS)}.", f"unknown metric {metric!r}")
    check(arguments.run, arguments.ship)
    check_profile(arguments.profile)
    if arguments.cluster is not None:
        connect(arguments.cluster)
    with profiled(arguments.profile):
        train(arguments.run, METRICS[metric], arguments.ship)
    for folder in export_folders(arguments.run, arguments.ship):
        console().print(f"written: {folder}", soft_wrap=True)


def main(argv: list[str]) -> int:
    return exit_code(lambda: finetune(argv), "; the same command resumes from the last save")
