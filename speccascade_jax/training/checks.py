"""Checks a training run before it starts: values, files, folders, hosts, memory."""

import dataclasses
import importlib.util
import math
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

import jax

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints.families import MODEL_FAMILIES
from speccascade_jax.config import (
    DEMO,
    ONLY_IN_THE_REPOSITORY,
    ExitTraining,
    LearnedRuleConfig,
    Task,
    TrainConfig,
    in_the_repository_only,
)
from speccascade_jax.core.divergences import DIVERGENCES
from speccascade_jax.core.errors import FieldError, check_range
from speccascade_jax.core.rules import METHODS
from speccascade_jax.models import Config, ExitsConfig, NetworkConfig, full_of, model_of
from speccascade_jax.models.t5gemma import T5GemmaConfig
from speccascade_jax.tokenizers.tokenizer import PIECES
from speccascade_jax.training.data import SCHEMES
from speccascade_jax.training.exits import CURRICULA
from speccascade_jax.training.lora import check_adapters
from speccascade_jax.training.optimizer import OPTIMIZERS

LARGEST = 2**31 - 1  # largest int32
NAMES = {
    "optimizer": OPTIMIZERS,
    "decay": ("constant", "linear"),
    "divergence": DIVERGENCES,
    "method": METHODS,
    "dtype": ("bfloat16", "float32"),
    "curriculum": CURRICULA,
    "tokenizer_pieces": PIECES,
    "lora_base": ("float32", "bfloat16"),
}
LEAST = {
    "tokenizer_size": 1,
    "teacher_examples": 1,
    "kept_epochs": 0,
    "steps": 1,
    "batch_tokens": 1,
    "accumulate": 1,
    "warmup_steps": 0,
    "eval_every": 1,
    "save_every": 1,
    "log_every": 1,
    "validation_examples": 0,
    "seed": 0,
    "lora_rank": 0,
    "ahead": 1,
    "max_source_length": 1,
    "max_target_length": 1,
    "join": 1,
}
"""The smallest value of each integer field; the largest is LARGEST."""
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "learning_rate": (lambda x: x >= 0, "of at least 0"),
    "weight_decay": (lambda x: x >= 0, "of at least 0"),
    "z_loss": (lambda x: x >= 0, "of at least 0"),
    "clip_norm": (lambda x: x > 0, "above 0"),
    "lora_alpha": (lambda x: x > 0, "above 0"),
    "exit_weight": (lambda x: x >= 0, "of at least 0"),
    "layer_dropout": (lambda x: 0 <= x < 1, "from 0 to below 1"),
    "distillation": (lambda x: 0 <= x <= 1, "from 0 to 1"),
    "on_policy": (lambda x: 0 <= x <= 1, "from 0 to 1"),
    "label_smoothing": (lambda x: 0 <= x < 1, "from 0 to below 1"),
}


def check(config: TrainConfig, ship: bool = False) -> None:
    """Raises ValueError, with a remedy, for anything that would end the run later: a value out of range, a
    missing file, a folder that is not writable, an unreachable host. Uses no device.

    ship: whether the run replaces the weights bundled with the package.
    """
    check_fields(config)
    check_fields(config.task)
    check_fields(config.exits)
    MODEL_FAMILIES[config.model.family].check(f"config {config.name}", config.model)
    resumed = any(Path(config.output_dir, "latest").glob("[0-9]*"))
    begins = {"init": config.init} if config.lora_rank or not resumed else {}
    begins |= {"drafter": config.exits.drafter} if not resumed else {}
    checkpoints_read = {**begins, "teacher": config.teacher}
    for path in (config.tokenizer, *checkpoints_read.values()):
        if path is not None and path.startswith("gs://"):
            check_reachable(path)
    for role, path in checkpoints_read.items():
        if path is not None and not checkpoints.is_remote(path) and not Path(path).is_dir():
            raise FieldError(
                role,
                path,
                ONLY_IN_THE_REPOSITORY
                if in_the_repository_only(path)
                else "create it first, or choose another one.",
                f"there is no checkpoint folder {path}, which --{role} names",
            )
    if config.tokenizer and in_the_repository_only(config.tokenizer) and not Path(config.tokenizer).is_file():
        raise FieldError(
            "tokenizer",
            config.tokenizer,
            ONLY_IN_THE_REPOSITORY,
            f"the tokenizer {config.tokenizer} is missing",
        )
    check_needs(config)
    check_rule(config)
    if config.lora_rank:
        check_lora(config)
    if isinstance(config.model, NetworkConfig):
        check_network(config, config.model)
    for split in ("train", "validation"):
        check_split(split, getattr(config.task, split))
    check_outputs(config, ship)


def check_needs(config: TrainConfig) -> None:
    """Raises FieldError for a field whose prerequisite field is missing."""
    if config.teacher_outputs is not None and config.teacher is None:
        raise FieldError(
            "teacher_outputs",
            config.teacher_outputs,
            "give its checkpoint with --teacher.",
            "teacher_outputs are decoded by a teacher",
        )
    if config.teacher_singles and config.teacher_outputs is None:
        raise FieldError(
            "teacher_singles",
            True,
            "name their file with --teacher-outputs.",
            "teacher_singles describes teacher_outputs",
        )
    if config.teacher_tokens and config.teacher is None:
        raise FieldError(
            "teacher_tokens",
            True,
            "give its checkpoint with --teacher.",
            "teacher_tokens splits targets as the teacher does",
        )
    if config.on_policy and (config.teacher is None or isinstance(config.model, NetworkConfig)):
        raise FieldError(
            "on_policy",
            config.on_policy,
            "give its checkpoint with --teacher, and train a single model; or set on_policy to 0.",
            "on_policy lets a teacher score the texts of one model",
        )
    if config.kept_epochs:
        check_kept(config)
    if config.tokenizer is None and config.init is None:
        raise FieldError(
            "tokenizer",
            None,
            "give its file with --tokenizer; if it does not exist, it is trained on the task.",
            "training from scratch needs a tokenizer",
        )


def check_kept(config: TrainConfig) -> None:
    """Raises FieldError if nothing can be kept of a frozen model's passes."""
    network = isinstance(config.model, NetworkConfig)
    if config.on_policy:
        raise FieldError(
            "kept_epochs",
            config.kept_epochs,
            "set one of them to 0.",
            f"with on_policy ({config.on_policy}) the model writes new texts in every epoch",
        )
    if not (config.exits.frozen if network else config.teacher and config.distillation):
        raise FieldError(
            "kept_epochs",
            config.kept_epochs,
            "freeze the full model with --frozen."
            if network
            else "give its checkpoint with --teacher, and set distillation above 0.",
            "kept_epochs keeps what a frozen "
            + ("full model computes" if network else "teacher computes for its distributions"),
        )


def check_rule(config: TrainConfig) -> None:
    """Raises FieldError for a rule that drafters cannot be trained for, and for distillation fields without a
    teacher."""
    members = isinstance(config.model, NetworkConfig)
    learns = (config.distillation or config.on_policy) and (config.teacher is not None or members)
    for field in ("divergence", "method", "alpha"):
        value = getattr(config, field)
        if value != getattr(TrainConfig, field) and not learns:
            raise FieldError(
                field,
                value,
                f"set distillation above 0{'' if members else ' and give a checkpoint with --teacher'}, or "
                "leave it out.",
                f"{field} is {value!r}, but this run does not learn the distributions of a "
                + ("full model" if members else "teacher"),
            )
    name, method = config.method, METHODS[config.method]
    if method.trained or not method.by_prefix:
        known = [name for name, entry in METHODS.items() if entry.by_prefix and not entry.trained]
        raise FieldError(
            "method",
            name,
            f"choose one of {', '.join(known)}.",
            f"no drafter can be trained for {name}, "
            + (
                "which is trained for an existing pair"
                if method.trained
                else "which depends on positions in a round"
            ),
        )
    try:
        check_range("alpha", config.alpha, method.low, method.high)
    except FieldError as error:
        raise FieldError("alpha", config.alpha, f"for {name} {error.remedy}") from None


def check_fields(config: TrainConfig | Task | ExitTraining) -> None:
    """Raises FieldError for the first field that is out of range, an unknown name, or not text."""
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if value is None:
            continue
        texts = value if isinstance(value, tuple) else (value,)
        for text in texts:
            if isinstance(text, str) and ("\0" in text or not encodable(text)):
                raise FieldError(
                    name,
                    value,
                    "give a text that UTF-8 can encode.",
                    f"{name} is {value!a}, which is not valid Unicode text",
                )
        if name in NAMES and value not in NAMES[name]:
            raise FieldError(name, value, f"known: {', '.join(NAMES[name])}.", f"unknown {name} {value!r}")
        if name in LEAST and not (isinstance(value, int) and LEAST[name] <= value <= LARGEST):
            raise FieldError(
                name, value, f"it must be an integer of at least {LEAST[name]}, and below 2**31."
            )
        if name in RANGES:
            fits, wanted = RANGES[name]
            if not (isinstance(value, int | float) and is_finite(value) and fits(value)):
                raise FieldError(name, value, f"it must be a number {wanted}.")


def is_finite(value: float) -> bool:
    """Whether float64 can represent `value`; an integer of 400 digits overflows."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_head(config: TrainConfig) -> None:
    """Raises FieldError if this config cannot train an EAGLE-3 head."""
    if not config.exits.frozen:
        raise FieldError(
            "frozen",
            False,
            "leave --no-frozen out.",
            "an EAGLE-3 head is trained with a frozen verifier",
        )
    if config.distillation != 1:
        raise FieldError(
            "distillation",
            config.distillation,
            "set it to 1.",
            "an EAGLE-3 head may lack tokens of the data: it learns from its verifier's distributions only",
        )


def check_network(config: TrainConfig, network: NetworkConfig) -> None:
    """Raises FieldError if this config cannot train the members of a network."""
    if network.learns_ahead:
        check_head(config)
    resumed = any(Path(config.output_dir, "latest").glob("[0-9]*"))
    if config.exits.frozen and config.init is None and not resumed:
        raise FieldError(
            "init",
            None,
            "give its checkpoint with --init, or train it, too, with --no-frozen.",
            "the full model is not trained (frozen)",
        )
    if config.exits.frozen and isinstance(config.model, ExitsConfig) and config.model.head == "shared":
        raise FieldError(
            "head",
            "shared",
            "choose another head, or train all with --no-frozen.",
            "these exits have nothing of their own (head is shared) and the full model is not "
            "trained (frozen)",
        )
    init, export = (
        None if path is None else Path(path).resolve() for path in (config.init, config.export_dir)
    )
    if export and not (config.exits.frozen and init and init.parent == export.parent):
        raise FieldError(
            "export_dir",
            config.export_dir,
            f"leave it out; the run in {config.output_dir} is a checkpoint itself.",
            f"export_dir is {config.export_dir}, but what is exported of a network has the small "
            "members only, and names the folder of the full model, --init, which is not trained (frozen) and "
            "lies next to it",
        )


def check_lora(config: TrainConfig) -> None:
    """Raises ValueError if the model cannot be trained with adapters."""
    if config.init is None:
        raise FieldError(
            "lora_rank",
            config.lora_rank,
            "name it with --init.",
            "adapters (lora_rank) need the parameters of a checkpoint",
        )
    if isinstance(config.model, NetworkConfig):
        raise FieldError(
            "lora_rank",
            config.lora_rank,
            "set lora_rank to 0.",
            "adapters (lora_rank) are for one model; the members of a network are trained next "
            "to a frozen one without",
        )
    check_adapters(config)


def encodable(text: str) -> bool:
    try:
        text.encode()
        return True
    except UnicodeEncodeError:
        return False


def check_reachable(path: str) -> None:
    """Raises ValueError if the host of gs:// is unreachable. TensorStore would retry for 15 seconds and log
    each attempt."""
    server = os.environ.get("TENSORSTORE_GCS_HTTP_URL", "https://storage.googleapis.com")
    bucket = path.removeprefix("gs://").split("/")[0]
    try:
        urllib.request.urlopen(urllib.request.Request(f"{server}/{bucket}", method="HEAD"), timeout=5).close()
    except (urllib.error.HTTPError, HTTPException):
        return  # an HTTP error is an answer; reading the file explains it
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        if not isinstance(cause, ssl.SSLError):  # TensorStore ships its own certificates
            raise ValueError(
                f"cannot read {path}: {server} cannot be reached from here ({cause}); give a "
                "local copy instead."
            ) from None


def check_split(split: str, path: str) -> None:
    """Raises ValueError if the file of a split or the library that reads it is missing, and FieldError for a
    query of generated examples that is invalid."""
    scheme, _, name = path.partition("://")
    if scheme in SCHEMES and name:
        source = SCHEMES[scheme]
        if source.module is not None and importlib.util.find_spec(source.module) is None:
            raise ValueError(f"to read {path}: pip install {source.package}; or give a .jsonl file.")
        source.read(name)  # raises for an invalid query; reads nothing before the first example
    elif not path or not Path(path).exists():
        raise FieldError(
            split, path, f"name one with --{split}.", f"there is no file {path!r}, the task's {split} split"
        )
    elif Path(path).is_dir():
        raise FieldError(
            split, path, f"name a file with --{split}.", f"{path}, the task's {split} split, is a folder"
        )


def export_folders(config: TrainConfig, ship: bool = False) -> list[Path]:
    """The folders for the run's best parameters: one inside the run and, if `ship`, one in the package.

    Without export_dir, networks and models that the Hugging Face format does not support have no folder in
    the run, because the run is itself a checkpoint. Raises FieldError if `ship` and the config has no folder
    in the package.
    """
    folders = []
    if config.export_dir is not None:
        folders.append(Path(config.export_dir))
    elif not isinstance(config.model, NetworkConfig) and holds(config.model):
        folders.append(Path(config.output_dir, "export"))
    if ship:
        folders.append(shipped_at(config))
    return folders


def holds(model: Config) -> bool:
    """Whether the Hugging Face format supports the model."""
    try:
        checkpoints.check_savable(model, "huggingface")
        return True
    except ValueError:
        return False


def shipped_at(config: TrainConfig | LearnedRuleConfig) -> Path:
    """The path that --ship writes to. Raises FieldError if the config makes no part of the package."""
    if config.shipped is None or Path(config.shipped).name != config.shipped:
        raise FieldError(
            "ship",
            True,
            "leave --ship out, and use the run's folder or file in a config for decoding.",
            f"config {config.name} makes nothing that is bundled with the package",
        )
    return DEMO / config.shipped


def check_not_shipped(field: str, path: str | Path) -> None:
    """Raises FieldError for a path among the weights bundled with the package: only --ship writes there."""
    if Path(path).resolve().is_relative_to(DEMO.resolve()):
        raise FieldError(
            field,
            str(path),
            "choose another place; --ship replaces the package's weights.",
            f"{field} is {path}, among the weights bundled with the package",
        )


def check_outputs(config: TrainConfig, ship: bool = False) -> None:
    """Raises FieldError if a path that the run writes to is not a folder, is not writable, or holds other
    files that must not be lost."""
    run = Path(config.output_dir)
    check_folder("output_dir", config.output_dir)
    check_not_shipped("output_dir", config.output_dir)
    if not (run / "model.json").is_file():
        for name in ("config.json", "checkpoint", "_METADATA"):
            if (run / name).exists():
                raise FieldError(
                    "output_dir",
                    str(run),
                    "choose another folder.",
                    f"output_dir is {run}, which holds another checkpoint ({name})",
                )
    if config.export_dir is not None:
        check_not_shipped("export_dir", config.export_dir)
    for export in export_folders(config, ship):
        check_export(config, export)
    for name in ("tokenizer", "teacher_outputs"):
        path = getattr(config, name)
        if path is None or (path.startswith("gs://") and name == "tokenizer"):
            continue
        if Path(path).exists() and not Path(path).is_file():
            raise FieldError(name, path, "choose another one.", f"{name} is {path}, which is not a file")
        if not Path(path).exists():
            check_folder(name, os.path.dirname(path) or ".")
            if name == "tokenizer" and config.tokenizer_size > config.model.vocab_size:
                raise FieldError(
                    "tokenizer_size",
                    config.tokenizer_size,
                    "set model.vocab_size to at least "
                    f"that: the model has {config.model.vocab_size} entries.",
                )


def check_export(config: TrainConfig, export: Path) -> None:
    """Raises FieldError if the best parameters cannot be written to `export`, or would overwrite files that
    the run reads."""
    check_folder("export_dir", str(export))
    if not isinstance(config.model, NetworkConfig):
        checkpoints.check_savable(config.model, "huggingface")
    folders = {"output_dir": config.output_dir, "init": config.init, "teacher": config.teacher}
    for name, other in folders.items():
        if other is not None and Path(other).resolve() == export.resolve():
            raise FieldError(
                "export_dir",
                str(export),
                "choose another one.",
                f"export_dir and {name} are the same folder, {export}",
            )
    if (export / "model.json").exists() and not isinstance(config.model, NetworkConfig):
        raise FieldError(
            "export_dir",
            str(export),
            "choose another folder.",
            f"export_dir is {export}, which holds a run (model.json)",
        )


def check_folder(name: str, path: str) -> None:
    """Raises FieldError unless `path` is a writable folder or can be created as one."""
    if not path or "://" in path:
        raise FieldError(name, path, "it must be a local folder.")
    try:
        parent = next(p for p in (Path(path), *Path(path).absolute().parents) if p.exists())
    except OSError as error:
        raise FieldError(name, path, "choose another one.", f"{name} is {path}: {error.strerror}") from None
    if not parent.is_dir():
        raise FieldError(
            name, path, "choose another one.", f"{name} is {path}, but {parent} is a file: Not a directory"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise FieldError(
            name, path, "choose another one.", f"{name} is {path}, but {parent} cannot be written to"
        )


def check_memory(config: TrainConfig, rows: int) -> None:
    """Raises ValueError if a batch of `rows` rows is certain to exceed a device's memory."""
    full, task, devices = full_of(config.model), config.task, jax.device_count()
    model = full.decoder if isinstance(full, T5GemmaConfig) else full
    stats = jax.local_devices()[0].memory_stats() or {}
    memory = stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    widest = max(model.vocab_size, model.d_ff, model.num_heads * model.d_kv)
    parameters = model.d_model * widest  # a lower bound, in case the model is too large to count exactly
    if 4 * parameters < memory:
        shapes = jax.tree.leaves(model_of(config.model).abstract_params())
        parameters = sum(math.prod(x.shape) for x in shapes)
    row_bytes, share = 4 * rows // devices, devices if config.split_parameters else 1
    what, bytes_each = "the parameters and their gradients", 8
    if config.lora_rank:
        what, bytes_each = "the parameters", 2 if config.lora_base == "bfloat16" else 4
    needed = {
        what: bytes_each * parameters / share,
        "the logits": row_bytes * task.max_target_length * model.vocab_size,
        "a layer's attention scores": row_bytes * model.num_heads * task.max_source_length**2,
    }
    what, largest = max(needed.items(), key=lambda item: item[1])
    if largest > memory:
        raise ValueError(
            f"{what} need {largest / 2**30:,.1f} GiB on each device, which has "
            f"{memory / 2**30:,.1f} ({parameters:,} parameters; batches of {rows} rows of "
            f"{task.max_source_length}/{task.max_target_length} tokens): take a smaller model, "
            "lower the task's limits, or take more devices with --split-parameters."
        )
