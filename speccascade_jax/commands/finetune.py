"""Fine-tunes (or trains from scratch) the model of a config, or the router or learned mixture of a pair.

    python scripts/finetune.py --config=demo_verifier
    python scripts/finetune.py --config=demo_router
    python scripts/finetune.py --config=demo_mixture

Killed and started again, it resumes from its last save. The best parameters are exported to the run's folder
(`export` in it); those that come with the package are replaced with --ship only.
"""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from speccascade_jax.cluster import connect
from speccascade_jax.commands.commandline import (
    TRAINED,
    config_of,
    console,
    exit_code,
    program,
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
    """A run; every field of its config is a flag."""

    run: tyro.conf.OmitArgPrefixes[TrainConfig]
    config: str
    """A name in configs/ or the path of such a file; its fields are the defaults of all other flags."""
    cluster: str | None = None
    """Train with other processes: `auto` on TPU pods and Slurm, else HOST:PORT,PROCESSES,NUMBER in each."""
    list: Annotated[bool, tyro.conf.arg(name="list")] = False
    """List the configs to train with, and stop."""
    ship: bool = False
    """Also replace the weights of this name that come with the package (speccascade_jax/demo)."""
    profile: str | None = None
    """Write a trace of the training to this new folder, for XProf, TensorBoard or Perfetto."""


@dataclasses.dataclass(frozen=True)
class LearnedRuleArguments:
    """A router or a learned mixture; every field of its config is a flag."""

    run: tyro.conf.OmitArgPrefixes[LearnedRuleConfig]
    config: str
    """A name in configs/ or the path of such a file; its fields are the defaults of all other flags."""
    ship: bool = False
    """Also replace the network of this name that comes with the package (speccascade_jax/demo)."""


def check_rule(config: str, run: LearnedRuleConfig, ship: bool) -> None:
    """Raises ValueError where the network could not be written, or something else would be lost."""
    run.check()
    output = Path(run.output)
    check_folder("output", str(output.parent))
    check_not_shipped("output", output)
    if output.exists():
        load_rule(output)  # raises for what is no such network: it is somebody else's
    if ship:
        shipped_at(run)
    output.parent.mkdir(parents=True, exist_ok=True)
    check_targets({"--output": output}, {"--config": path_of(config)})


def finetune_rule(config: str, run: LearnedRuleConfig, argv: list[str]) -> None:
    arguments = tyro.cli(
        LearnedRuleArguments,
        default=LearnedRuleArguments(run, config),
        args=argv,
        prog=program("finetune"),
        description=__doc__,
    )
    run = arguments.run
    check_rule(config, run, arguments.ship)
    screen = console()
    figures = train_rule(run, replaced)
    for what, figure in figures.items():
        screen.print(f"on texts held out: {what}: {figure:.4f}")
    if not improves(figures):
        worse = f"on texts held out this {run.method} is no better than the rule it corrects"
        if arguments.ship:
            raise FieldError("ship", True, "nothing that comes with the package was replaced.", worse)
        screen.print(
            f"{worse}: decode without it. More examples (--examples) may help. Written for a closer look: "
            f"{run.output}",
            soft_wrap=True,
        )
        return
    if arguments.ship:
        write_whole(shipped_at(run), Path(run.output).read_text(encoding="utf-8"))
    screen.print(
        f"written: {run.output}. Decode with it: python scripts/decode.py --config={run.pair} "
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
    arguments = tyro.cli(
        Arguments, default=Arguments(run, name), args=argv, prog=program("finetune"), description=about
    )
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
