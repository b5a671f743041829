"""What a run is made of: frozen dataclasses, and `load(name)` for the files in configs/."""

import dataclasses
import difflib
import os
import runpy
from pathlib import Path
from typing import Any

import jax
from tyro.conf import AvoidSubcommands, Suppress

from speccascade_jax.inference.settings import Settings
from speccascade_jax.models import Config

DTYPES = "float32", "bfloat16", "int8"
PACKAGE = Path(__file__).resolve().parent
CONFIGS = next((folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if folder.is_dir()),
               PACKAGE / "configs")
"""The configs that come with the package: inside an installed one, next to it in a checkout."""
DEMO = PACKAGE / "demo"
"""The pairs that come with the package."""
_SHARED = PACKAGE.parent.parent / "shared" / "data"
DATA = os.environ.get("SPECCASCADE_DATA") or str(_SHARED if _SHARED.is_dir() else Path("data"))
"""Where configs look for datasets: $SPECCASCADE_DATA, else ../shared/data next to the checkout where that
exists, else ./data."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A dataset: .jsonl or .tsv files, gzipped or not, or hf:// and tfds:// names (data.read_examples)."""

    train: str
    validation: str
    test: str
    source_field: str = "source"       # may be dotted: translation.en
    target_field: str = "target"
    references_field: str = "targets"  # optional: all references of an example
    metric: str = "bleu"               # of decoded texts: bleu, rouge1, rouge2, rougeLsum
    prefix: str = ""                   # put before every source
    suffix: str = ""                   # put behind it: decoder-only models write the target after that
    max_source_length: int = 80        # tokens, the end-of-sequence token included
    max_target_length: int = 80
    join: int = 1                      # one to this many random examples are joined into one


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One fine-tuning run, from scratch or from `init`."""

    name: str
    output_dir: str
    model: AvoidSubcommands[Config]
    task: Task
    tokenizer: str | None = None      # its file (or at gs://), trained on the task where it is missing;
                                      # None: that of `init`
    tokenizer_size: int = 4096        # pieces, if it has to be trained
    init: str | None = None           # checkpoint to start from
    teacher: str | None = None        # checkpoint to learn from, beside the data
    distillation: float = 0.5         # weight of the divergence from the teacher; the rest is the data's loss
    divergence: str = "kl"            # of the teacher's distribution: kl or tv
    teacher_outputs: str | None = None  # .jsonl to train on instead of the targets: the teacher's own
                                        # outputs, decoded once where the file is missing
    teacher_examples: int | None = None  # at most so many of them
    export_dir: str | None = None     # the best parameters go here as a Hugging Face folder, bfloat16
    steps: int = 10_000
    batch_tokens: int = 2048          # positions a batch, of the longer side, padding included
    accumulate: int = 1               # batches a step
    optimizer: str = "adafactor"      # or adamw, its updates scaled by each array's RMS
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    decay: str = "constant"           # or linear, to zero
    weight_decay: float = 0.0         # adamw's
    label_smoothing: float = 0.0
    z_loss: float = 1e-4
    clip_norm: float | None = None    # largest norm of a step's gradient
    dtype: str = "bfloat16"           # of the matrix products; parameters stay float32
    split_parameters: bool = False    # FSDP: parameters and optimizer state cut over the devices
    remat: bool = False               # recompute each layer in the backward pass: less memory, slower
    eval_every: int = 500
    save_every: int = 500
    log_every: int = 50
    validation_examples: int = 256    # decoded for task.metric at every evaluation; 0 for none
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig(Settings):
    """A cascade and how it decodes; every field, those of Settings too, is a flag of scripts/decode.py."""

    drafter: str                   # checkpoint folder of the small model
    verifier: str                  # checkpoint folder of the large model
    method: str = "speculative"    # a rule or baseline of --list, or verifier / drafter alone
    max_new_tokens: int = 80       # the end-of-sequence token included
    batch_size: int = 1            # inputs decoded side by side; from 2 on, on each device
    max_source_length: int = 80    # tokens, the end-of-sequence token included
    truncate: bool = False         # cut longer inputs instead of refusing them
    prefix: str = ""               # put before every input
    suffix: str = ""               # put behind it, for decoder-only models: what their output follows
    tokenizer: str | None = None   # spiece.model or tokenizer.json, where the checkpoints have none
    tensor_parallel: int = 1       # devices that share each model's parameters
    dtype: str = "auto"            # of weights and products: float32, bfloat16, int8; auto: float32 on CPUs
    # For configs only, no flags:
    task: Suppress[str | None] = None  # the training config whose task it is scored on
    missing: Suppress[str] = ""    # what to do where a checkpoint is missing, for people
    examples: Suppress[tuple[str, ...]] = ()  # decoded when no input is given

    @property
    def settings(self) -> Settings:
        """How each text is decoded."""
        return Settings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)})


def dtype_of(config: DecodeConfig) -> str:
    """The dtype of a config's weights here. Raises ValueError for an unknown one."""
    if config.dtype == "auto":
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype is {config.dtype!r}; known: auto, {', '.join(DTYPES)}.")
    return config.dtype


def available() -> dict[str, Path]:
    """Name -> file of every config that comes with the package, and of those in ./configs."""
    folders = [CONFIGS, Path.cwd() / "configs"]
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
