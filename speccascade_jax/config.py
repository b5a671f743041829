"""What a run is made of: frozen dataclasses, and `load(name)` for the files in configs/."""

import argparse
import dataclasses
import difflib
import os
import runpy
from pathlib import Path
from typing import Any

from speccascade_jax.models.t5 import T5Config

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = os.environ.get("SPECCASCADE_DATA", str(REPOSITORY.parent / "shared" / "data"))
"""Where configs look for datasets: $SPECCASCADE_DATA, else ../shared/data beside the checkout."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A dataset: .jsonl or .jsonl.gz files with one example a line."""

    train: str
    validation: str
    test: str
    source_field: str = "source"
    target_field: str = "target"
    references_field: str = "targets"  # optional: all references of an example
    prefix: str = ""                   # put before every source
    max_source_length: int = 80        # tokens, the end-of-sequence token included
    max_target_length: int = 80
    join: int = 1                      # one to this many random examples are joined into one


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One fine-tuning run, from scratch or from `init`."""

    name: str
    output_dir: str
    model: T5Config
    task: Task
    tokenizer: str                    # SentencePiece file, trained on the task where it is missing
    tokenizer_size: int = 4096        # pieces, if it has to be trained
    init: str | None = None           # checkpoint to start from
    teacher: str | None = None        # checkpoint whose distributions to learn from, beside the data
    distillation: float = 0.5         # weight of KL(teacher || model); the rest is the data's loss
    export_dir: str | None = None     # the best parameters go here as a Hugging Face folder, bfloat16
    steps: int = 10_000
    batch_tokens: int = 2048          # target positions a step, padding included
    optimizer: str = "adamw"          # adamw (updates scaled by each array's RMS) or adafactor
    learning_rate: float = 0.01
    warmup_steps: int = 200
    decay: str = "linear"             # linear to zero, or constant
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 1e-4
    clip_norm: float = 1.0
    dtype: str = "bfloat16"           # of the matrix products; parameters stay float32
    eval_every: int = 500
    save_every: int = 500
    log_every: int = 50
    validation_examples: int = 256    # decoded for BLEU at every evaluation
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """A cascade and how it decodes; every field is a flag of scripts/decode.py."""

    drafter: str                   # checkpoint folder of the small model
    verifier: str                  # checkpoint folder of the large model
    method: str = "speculative"    # a deferral rule of --list, or verifier / drafter alone
    alpha: float = 0.0             # lenience: larger defers less and is cheaper
    block_size: int = 5            # gamma, the tokens drafted per verifier call
    temperature: float = 0.0       # 0 is greedy
    top_k: int | None = None       # sample among the k likeliest tokens
    top_p: float | None = None     # sample among the likeliest tokens that reach this mass
    seed: int = 0                  # with an input's number it fixes the output, whatever the batch
    batch_size: int = 1            # inputs decoded side by side
    max_source_length: int = 80    # tokens, the end-of-sequence token included
    max_new_tokens: int = 80       # the end-of-sequence token included
    truncate: bool = False         # cut longer inputs instead of refusing them
    prefix: str = ""               # put before every input
    dtype: str = "auto"            # weights and caches: float32, bfloat16, auto (float32 on CPUs)
    missing: str = ""              # what to do where a checkpoint is missing, for people
    examples: tuple[str, ...] = () # decoded when no input is given


def from_command_line(argv: list[str], kind: type, default: str | None = None) -> tuple[str, Any]:
    """The name after --config in argv (or `default`), and that config, which must be a `kind`.

    Found before the rest of the command line is parsed: its fields are the other flags' defaults.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", default=default)
    name = finder.parse_known_args(argv)[0].config
    if name is None:
        raise ValueError(f"give --config=NAME, one of: {', '.join(available())}.")
    config = load(name)
    if not isinstance(config, kind):
        raise ValueError(f"config {name} is a {type(config).__name__}; this script runs a {kind.__name__}.")
    return name, config


def available() -> dict[str, Path]:
    """Name -> file of every config in the checkout's configs/ and in ./configs."""
    folders = [REPOSITORY / "configs", Path.cwd() / "configs"]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.py"))
            if not path.stem.startswith("_")}


def load(name: str) -> Any:
    """The `config` of a file in configs/, or of the file at path `name`.

    Raises ValueError naming the nearest known config where there is none.
    """
    path = Path(name) if name.endswith(".py") else available().get(name)
    if path is None or not path.is_file():
        known = available()
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no config {name!r}{hint} Known: {', '.join(known) or 'none'}.")
    found = runpy.run_path(str(path)).get("config")
    if found is None:
        raise ValueError(f"{path} defines no `config`.")
    return found
