"""Fine-tunes (or trains from scratch) the model of a config, or the router or learned mixture of a pair.

    python scripts/finetune.py --config=demo_verifier
    python scripts/finetune.py --config=demo_router
    python scripts/finetune.py --config=demo_mixture

Killed and started again, it goes on from its last save.
"""

import dataclasses
from pathlib import Path

import tyro

from speccascade_jax.commands.commandline import config_of, console, exit_code
from speccascade_jax.config import RouterConfig, TrainConfig, load, path_of
from speccascade_jax.evaluation.quality import METRICS, replaced
from speccascade_jax.inference.outputs import check_targets
from speccascade_jax.parallel import connect
from speccascade_jax.training.checks import check
from speccascade_jax.training.loop import train
from speccascade_jax.training.router import train_router

SHOWN = "demo_verifier"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A run; every field of its config is a flag."""

    run: tyro.conf.OmitArgPrefixes[TrainConfig]
    config: str
    """A name in configs/ or the path of such a file; its fields are the defaults of all other flags."""
    cluster: str | None = None
    """Train with other processes: `auto` on TPU pods and Slurm, else HOST:PORT,PROCESSES,NUMBER in each."""


@dataclasses.dataclass(frozen=True)
class RouterArguments:
    """A router or a learned mixture; every field of its config is a flag."""

    run: tyro.conf.OmitArgPrefixes[RouterConfig]
    config: str
    """A name in configs/ or the path of such a file; its fields are the defaults of all other flags."""


def finetune_router(name: str, run: RouterConfig, argv: list[str]) -> None:
    own = tyro.cli(RouterArguments, default=RouterArguments(run, name), args=argv, prog="finetune.py",
                   description=__doc__).run
    own.check()
    Path(own.output).parent.mkdir(parents=True, exist_ok=True)
    check_targets({"--output": Path(own.output)}, {"--config": path_of(name)})
    screen = console()
    for what, figure in train_router(own, replaced).items():
        screen.print(f"on texts held out: {what}: {figure:.4f}")
    screen.print(f"written: {own.output}. Decode with it: python scripts/decode.py --config={own.pair} "
                 f"--method {own.method} --alpha 0.1 --router {own.output}", soft_wrap=True)


def finetune(argv: list[str]) -> None:
    name, run = config_of(argv, TrainConfig | RouterConfig)
    if isinstance(run, RouterConfig):
        finetune_router(name, run, argv)
        return
    about = __doc__
    if run is tyro.MISSING:  # of --help; without a config, no flag has a default
        run = load(SHOWN, TrainConfig)
        about = f"{__doc__}\nThe defaults shown are those of --config={SHOWN}.\n"
    arguments = tyro.cli(Arguments, default=Arguments(run, name), args=argv, prog="finetune.py",
                         description=about)
    metric = arguments.run.task.metric
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}: {', '.join(METRICS)}.")
    check(arguments.run)
    if arguments.cluster is not None:
        connect(arguments.cluster)
    train(arguments.run, METRICS[metric])


def main(argv: list[str]) -> int:
    return exit_code(lambda: finetune(argv), "; the same command goes on from the last save")
