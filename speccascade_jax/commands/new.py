"""Sets up your own task: writes the configs that train and decode a pair, from a file of examples.

    speccascade new dates --data dates.jsonl
    speccascade finetune --config=dates_verifier
    speccascade finetune --config=dates_drafter
    speccascade decode --config=dates

This writes configs/NAME_verifier.py, configs/NAME_drafter.py and configs/NAME.py, with model sizes, steps and
learning rates that suit the data, and the folder data/NAME, with the splits and a tokenizer trained on the
data. 5% of the sources, at most 500, are held out for validation, and the same number for testing. Existing
files are never overwritten.
"""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from speccascade_jax.commands.commandline import console, exit_code, parsed
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation.quality import METRICS
from speccascade_jax.training.checks import check_folder
from speccascade_jax.training.new_task import (
    SIZES,
    NewTask,
    check_absent,
    held_out,
    metric_of,
    read_pairs,
    write,
)

CONFIGS = Path("configs")  # --config=NAME looks for a file here and in the package


@dataclasses.dataclass(frozen=True)
class Arguments:
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """The name of the task: lower-case letters, digits and underscores."""
    data: str
    """The examples: a .jsonl file (each line an object, or a list of two texts) or a .tsv file with two
    columns, optionally gzipped."""
    source_field: str | None = None
    """The field with the source text. Default: guessed from the first line."""
    target_field: str | None = None
    """The field with the target text. Default: guessed from the first line."""
    metric: str | None = None
    """The metric of decoded texts. Default: exact_match if most targets have at most three words, otherwise
    bleu."""


def new(arguments: Arguments) -> None:
    name, data = arguments.name, Path("data", arguments.name)
    check_absent(name, data, CONFIGS)
    if arguments.metric is not None and arguments.metric not in METRICS:
        raise FieldError("metric", arguments.metric, f"known: {', '.join(METRICS)}.")
    for place in (CONFIGS, data):
        check_folder("name", str(place))
    splits = held_out(read_pairs(arguments.data, arguments.source_field, arguments.target_field))
    metric = arguments.metric or metric_of(splits["train"])
    size = next(size for size in SIZES if len(splits["train"]) <= size.pairs)
    task = NewTask(name, metric, size, splits, data, CONFIGS)
    choices = write(task)
    screen = console()
    counts = ", ".join(f"{len(pairs):,} for {split}" for split, pairs in splits.items())
    source, target = splits["train"][0]
    lines = [
        f"{data}: {counts}; first pair: {source[:60]!r} -> {target[:60]!r}",
        f"scored by {metric}; at most {choices['source_length']} tokens per source and "
        f"{choices['target_length']} per target",
    ]
    if choices["left_out"]:
        lines.append(f"{choices['left_out']:,} pairs are longer; training skips them.")
    lines += [f"written: {path}" for path in task.files]
    lines += ["", "Next:"]
    lines += [
        f"  speccascade {command}"
        for command in (
            f"finetune --config={name}_verifier",
            f"finetune --config={name}_drafter",
            f"decode --config={name}",
            f"evaluate --config={name} --methods verifier drafter speculative",
            f"plan --config={name} --check --output {name}_plan.py",
            f"serve --config={name}",
        )
    ]
    for line in lines:
        screen.print(line, soft_wrap=True)


def main(argv: list[str]) -> int:
    return exit_code(lambda: new(parsed(Arguments, argv, "new", __doc__)))
