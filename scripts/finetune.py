"""Fine-tunes (or trains from scratch) the model of a config.

    python scripts/finetune.py --config=demo_verifier

Killed and started again, it goes on from its last save.
"""

import dataclasses
import sys

import tyro
from rich.console import Console

from speccascade_jax import config as configs
from speccascade_jax import training
from speccascade_jax.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A run; every field of its config is a flag."""

    run: tyro.conf.OmitArgPrefixes[TrainConfig]
    config: str
    """A name in configs/ or the path of such a file; its fields are the defaults of all other flags."""


def main(argv: list[str]) -> int:
    try:
        name, run = configs.from_command_line(argv, TrainConfig)
        arguments = tyro.cli(Arguments, default=Arguments(run, name), args=argv, prog="finetune.py",
                             description=__doc__)
        training.train(arguments.run)
    except ValueError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
