"""Fine-tunes (or trains from scratch) the model of a config.

    python scripts/finetune.py --config=demo_verifier

Killed and started again, it goes on from its last save.
"""

import dataclasses

import tyro

from speccascade_jax.commands.commandline import config_of, exit_code
from speccascade_jax.config import TrainConfig, load
from speccascade_jax.evaluation.quality import METRICS
from speccascade_jax.parallel import connect
from speccascade_jax.training.checks import check
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


def finetune(argv: list[str]) -> None:
    name, run = config_of(argv, TrainConfig)
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
