"""The quality of a cascade's methods on a task's test split, decoded on all devices.

    python scripts/evaluate.py --config=demo --task=demo_verifier --methods verifier drafter token_v3
    python scripts/evaluate.py --config=demo --task=demo_verifier --methods verifier --join 1
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import tyro
from decode import table_of
from rich.console import Console
from rich.progress import track

from speccascade_jax import config as configs
from speccascade_jax.commandline import config_of, exit_code
from speccascade_jax.config import DecodeConfig, TrainConfig
from speccascade_jax.data import joined_examples
from speccascade_jax.evaluation import METRICS
from speccascade_jax.metrics import summarize
from speccascade_jax.parallel import make_mesh
from speccascade_jax.text import Cascade


@dataclasses.dataclass(frozen=True)
class Arguments:
    run: tyro.conf.OmitArgPrefixes[DecodeConfig]
    config: str = "demo"
    """A name in configs/ or the path of such a file; its fields are the defaults of all other flags."""
    task: str | None = None
    """A training config, whose task this is; demo has its own, demo_verifier."""
    split: str = "test"
    """train, validation or test."""
    methods: tuple[str, ...] = ("verifier", "drafter")
    """Decoded one after the other, all at the same alpha, temperature and so on."""
    join: int | None = None
    """One to this many examples are joined into one (the task's own number)."""
    limit: int | None = None
    """Decode only the first so many examples."""
    output: str | None = None
    """Write one JSON line for each method here."""


def evaluate(arguments: Arguments) -> None:
    if arguments.task is None and arguments.config != "demo":
        raise ValueError(f"--task is missing: name the training config whose task {arguments.config} is "
                         "scored on.")
    training = configs.load(arguments.task or "demo_verifier")
    if not isinstance(training, TrainConfig):
        raise ValueError(f"config {arguments.task} has no task: name one for scripts/finetune.py.")
    if arguments.split not in ("train", "validation", "test"):
        raise ValueError(f"unknown split {arguments.split!r}: train, validation or test.")
    run, task, console = arguments.run, training.task, Console(highlight=False)
    task = dataclasses.replace(task, join=arguments.join or task.join)
    examples = joined_examples(task, getattr(task, arguments.split))[:arguments.limit]
    sources, references = zip(*examples, strict=True)
    alone = jax.device_count() == 1 or run.tensor_parallel > 1
    cascade = Cascade.from_config(run, None if alone else make_mesh())
    for method in arguments.methods:
        before = cascade.clock.decode_seconds
        outputs = list(track(cascade.generate(
            sources, method=method, alpha=run.alpha, block_size=run.block_size, temperature=run.temperature,
            top_k=run.top_k, top_p=run.top_p, seed=run.seed, batch_size=run.batch_size,
            truncate=run.truncate), method, len(sources), transient=True))
        figures = {
            task.metric: METRICS[task.metric]([o.text for o in outputs], references),
            **summarize([o.counts for o in outputs]), "examples": len(outputs),
            "truncated": sum(o.truncated for o in outputs), "tokens": sum(len(o.tokens) for o in outputs),
            "decode_seconds": cascade.clock.decode_seconds - before}
        console.print(table_of(figures, f"{method}, alpha {run.alpha}, temperature {run.temperature}"))
        if arguments.output is not None:
            line = {"config": arguments.config, "method": method, "alpha": run.alpha,
                    "temperature": run.temperature, "gamma": run.block_size, **figures}
            with Path(arguments.output).open("a") as file:
                file.write(json.dumps(line) + "\n")


def parse(argv: list[str]) -> Arguments:
    name, run = config_of(argv, DecodeConfig, "demo")
    return tyro.cli(Arguments, default=Arguments(run, name), args=argv, prog="evaluate.py",
                    description=__doc__)


def main(argv: list[str]) -> int:
    return exit_code(lambda: evaluate(parse(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
