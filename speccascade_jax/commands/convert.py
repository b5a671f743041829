"""Converts a checkpoint into another format.

    python scripts/convert.py \\
        gs://t5-data/pretrained_models/t5x/t5_1_1_small/checkpoint_1000000 \\
        small --to=huggingface
    python scripts/convert.py runs/wmt_small OUT --to=t5x --dtype=bfloat16

OUT is created only once the conversion has finished; the tokenizer is copied with it.
"""

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import tyro

from speccascade_jax import checkpoints
from speccascade_jax.commands.commandline import console, exit_code, parsed
from speccascade_jax.inference.progress import track


@dataclasses.dataclass(frozen=True)
class Arguments:
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """The checkpoint to read: a folder (Hugging Face, T5X or a training run), gs://BUCKET/PATH or
    hf://ORGANISATION/NAME."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The folder to write, which must not exist yet."""
    to: Literal["huggingface", "t5x", "native"]
    """The format to write. native is the format of training runs."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the weights in OUT."""


def convert(arguments: Arguments) -> None:
    checkpoints.check_absent(arguments.out)  # better now than after minutes of loading
    checkpoints.check_savable(checkpoints.config_of(arguments.source), arguments.to)

    def reading(arrays: Iterable[Any], total: int) -> Iterable[Any]:
        return track(arrays, "reading", total)

    checkpoint = checkpoints.load(arguments.source, jnp.dtype(arguments.dtype), track=reading)
    errors = console(stderr=True)
    if errors.is_terminal:
        errors.print(f"writing {arguments.out}", soft_wrap=True)
    checkpoints.save(arguments.out, checkpoint, arguments.to, jnp.dtype(arguments.dtype))
    print(f"{arguments.out}: {arguments.to}, {arguments.dtype}, {checkpoint.model.config}")
    if checkpoint.tokenizer is None:
        print(f"{arguments.source} has no tokenizer: copy the model's spiece.model into {arguments.out}.")


def main(argv: list[str]) -> int:
    return exit_code(lambda: convert(parsed(Arguments, argv, "convert", __doc__)))
