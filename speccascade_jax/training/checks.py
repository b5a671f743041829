"""What is wrong with a run, found before it begins: values, files, folders, hosts, memory."""

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
from speccascade_jax.checkpoints.families import FAMILIES
from speccascade_jax.config import ExitTraining, Task, TrainConfig
from speccascade_jax.models import ExitsConfig, NetworkConfig, full_of, model_of
from speccascade_jax.models.t5gemma import T5GemmaConfig
from speccascade_jax.training.distillation import DIVERGENCES
from speccascade_jax.training.exits import CURRICULA
from speccascade_jax.training.lora import check_adapters

PIECES = "unigram", "bpe", "char"
LARGEST = 2**31 - 1  # what int32 counts
NAMES = {"optimizer": ("adafactor", "adamw"), "decay": ("constant", "linear"), "divergence": DIVERGENCES,
         "dtype": ("bfloat16", "float32"), "curriculum": CURRICULA, "tokenizer_pieces": PIECES,
         "lora_base": ("float32", "bfloat16")}
LEAST = {"tokenizer_size": 1, "teacher_examples": 1, "steps": 1, "batch_tokens": 1, "accumulate": 1,
         "warmup_steps": 0, "eval_every": 1, "save_every": 1, "log_every": 1, "validation_examples": 0,
         "seed": 0, "lora_rank": 0, "max_source_length": 1, "max_target_length": 1, "join": 1}
"""The smallest value of each whole number; the largest is LARGEST."""
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
    "label_smoothing": (lambda x: 0 <= x < 1, "from 0 to below 1")}


def check(config: TrainConfig) -> None:
    """Raises ValueError with the remedy for what would end a run later: a value out of its range, a file that
    is not there, a folder that cannot be written, a host that does not answer. Takes no device."""
    check_fields(config)
    check_fields(config.task)
    check_fields(config.exits)
    FAMILIES[config.model.family].check(f"config {config.name}", config.model)
    resumed = any(Path(config.output_dir, "latest").glob("[0-9]*"))
    begins = {"init": config.init} if config.lora_rank or not resumed else {}
    begins |= {"drafter": config.exits.drafter} if not resumed else {}
    checkpoints_read = {**begins, "teacher": config.teacher}
    for path in (config.tokenizer, *checkpoints_read.values()):
        if path is not None and path.startswith("gs://"):
            check_reachable(path)
    for role, path in checkpoints_read.items():
        if path is not None and not checkpoints.is_remote(path) and not Path(path).is_dir():
            raise ValueError(f"there is no checkpoint folder {path}, which --{role} names: make it first or "
                             "name another.")
    if config.teacher_outputs is not None and config.teacher is None:
        raise ValueError("teacher_outputs are decoded by a teacher: give its checkpoint with --teacher.")
    if config.teacher_singles and config.teacher_outputs is None:
        raise ValueError("teacher_singles says what teacher_outputs hold: name their file with "
                         "--teacher-outputs.")
    if config.teacher_tokens and config.teacher is None:
        raise ValueError("teacher_tokens cuts targets as the teacher does: give its checkpoint with "
                         "--teacher.")
    if config.on_policy and (config.teacher is None or isinstance(config.model, NetworkConfig)):
        raise ValueError("on_policy has a teacher score what one model writes: name its checkpoint with "
                         "--teacher, and train no network of members; or set on_policy to 0.")
    if config.tokenizer is None and config.init is None:
        raise ValueError("training from scratch needs a tokenizer: name its file with --tokenizer; it is "
                         "trained on the task where it is missing.")
    if config.lora_rank:
        check_lora(config)
    if isinstance(config.model, NetworkConfig):
        check_network(config)
    for split in ("train", "validation"):
        check_split(split, getattr(config.task, split))
    check_outputs(config)


def check_fields(config: TrainConfig | Task | ExitTraining) -> None:
    """Raises ValueError naming the first field that is out of its range, no known name or no text."""
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if value is None:
            continue
        if isinstance(value, str) and ("\0" in value or not encodable(value)):
            raise ValueError(f"{name} is {value!a}, which is no valid UTF-8 text.")
        if name in NAMES and value not in NAMES[name]:
            raise ValueError(f"unknown {name} {value!r}: {', '.join(NAMES[name])}.")
        if name in LEAST and not (isinstance(value, int) and LEAST[name] <= value <= LARGEST):
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {LEAST[name]}, and "
                             "below 2**31.")
        if name in RANGES:
            fits, wanted = RANGES[name]
            if not (isinstance(value, int | float) and math.isfinite(value) and fits(value)):
                raise ValueError(f"{name} is {value!r}; it must be a number {wanted}.")


def check_network(config: TrainConfig) -> None:
    """Raises ValueError where a network's members cannot be trained so."""
    resumed = any(Path(config.output_dir, "latest").glob("[0-9]*"))
    if config.exits.frozen and config.init is None and not resumed:
        raise ValueError("the full model is not trained (frozen): give its checkpoint with --init, or train "
                         "it, too, with --no-frozen.")
    if config.exits.frozen and isinstance(config.model, ExitsConfig) and config.model.head == "shared":
        raise ValueError("these exits have nothing of their own (head is shared) and the full model is not "
                         "trained (frozen): choose another head, or train all with --no-frozen.")
    init, export = (None if path is None else Path(path).resolve()
                    for path in (config.init, config.export_dir))
    if export and not (config.exits.frozen and init and init.parent == export.parent):
        raise ValueError(f"export_dir is {config.export_dir}; what is exported of a network has the small "
                         "members only, and names the folder of the full model, --init, which is not trained "
                         f"(frozen) and lies next to it: leave it out; the run in {config.output_dir} is a "
                         "checkpoint itself.")


def check_lora(config: TrainConfig) -> None:
    """Raises ValueError where the model cannot be trained by adapters."""
    if config.init is None:
        raise ValueError("adapters (lora_rank) are trained next to the parameters of a checkpoint: name it "
                         "with --init.")
    if isinstance(config.model, NetworkConfig):
        raise ValueError("adapters (lora_rank) are for one model; the members of a network are trained next "
                         "to a frozen one without: set lora_rank to 0.")
    check_adapters(config)


def encodable(text: str) -> bool:
    try:
        text.encode()
        return True
    except UnicodeEncodeError:
        return False


def check_reachable(path: str) -> None:
    """Raises ValueError where the host of gs:// does not answer: TensorStore would try for a quarter of a
    minute, and log it."""
    server = os.environ.get("TENSORSTORE_GCS_HTTP_URL", "https://storage.googleapis.com")
    bucket = path.removeprefix("gs://").split("/")[0]
    try:
        urllib.request.urlopen(urllib.request.Request(f"{server}/{bucket}", method="HEAD"), timeout=5).close()
    except (urllib.error.HTTPError, HTTPException):
        return  # an answer, if an unfriendly one; what it means is said when the file is read
    except (OSError, ValueError) as error:
        found = getattr(error, "reason", error)
        if not isinstance(found, ssl.SSLError):  # TensorStore has certificates of its own
            raise ValueError(f"cannot read {path}: {server} cannot be reached from here ({found}); give a "
                             "local copy instead.") from None


def check_split(split: str, path: str) -> None:
    """Raises ValueError where the file of a split, or the library that reads it, is not there."""
    scheme, _, name = path.partition("://")
    libraries = {"hf": ("datasets", "datasets"), "tfds": ("tensorflow_datasets", "tensorflow-datasets")}
    if scheme in libraries and name:
        module, package = libraries[scheme]
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"to read {path}: pip install {package}; or give a .jsonl file.")
    elif not path or not Path(path).exists():
        raise ValueError(f"there is no file {path!r}, the task's {split} split: name one with --{split}.")
    elif Path(path).is_dir():
        raise ValueError(f"{path}, the task's {split} split, is a folder: name a file with --{split}.")


def check_outputs(config: TrainConfig) -> None:
    """Raises ValueError where a folder that the run writes into is none, cannot be written or holds
    something else that is worth keeping."""
    run, export = Path(config.output_dir), config.export_dir
    check_folder("output_dir", config.output_dir)
    if not (run / "model.json").is_file():
        for name in ("config.json", "checkpoint", "_METADATA"):
            if (run / name).exists():
                raise ValueError(f"output_dir is {run}, which holds another checkpoint ({name}): choose "
                                 "another folder.")
    if export is not None:
        check_folder("export_dir", export)
        folders = {"output_dir": run, "init": config.init, "teacher": config.teacher}
        for name, other in folders.items():
            if other is not None and Path(other).resolve() == Path(export).resolve():
                raise ValueError(f"export_dir and {name} are the same folder, {export}: choose another.")
        if (Path(export) / "model.json").exists() and not isinstance(config.model, NetworkConfig):
            raise ValueError(f"export_dir is {export}, which holds a run (model.json): choose another "
                             "folder.")
    for name in ("tokenizer", "teacher_outputs"):
        path = getattr(config, name)
        if path is None or (path.startswith("gs://") and name == "tokenizer"):
            continue
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError(f"{name} is {path}, which is no file: name another.")
        if not Path(path).exists():
            check_folder(f"the folder of {name}", os.path.dirname(path) or ".")
            if name == "tokenizer" and config.tokenizer_size > config.model.vocab_size:
                raise ValueError(f"tokenizer_size is {config.tokenizer_size}, the model has "
                                 f"{config.model.vocab_size} entries: set model.vocab_size to at least that.")


def check_folder(name: str, path: str) -> None:
    """Raises ValueError unless `path` is, or can become, a folder that files can be written to."""
    if not path or "://" in path:
        raise ValueError(f"{name} is {path!r}; it must be a local folder.")
    try:
        parent = next(p for p in (Path(path), *Path(path).absolute().parents) if p.exists())
    except OSError as error:
        raise ValueError(f"{name} is {path}: {error.strerror}.") from None
    if not parent.is_dir():
        raise ValueError(f"{name} is {path}, but {parent} is a file: Not a directory; choose another.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{name} is {path}, but {parent} cannot be written to: choose another.")


def check_memory(config: TrainConfig, rows: int) -> None:
    """Raises ValueError where a batch of `rows` rows certainly needs more memory than a device has."""
    full, task, devices = full_of(config.model), config.task, jax.device_count()
    model = full.decoder if isinstance(full, T5GemmaConfig) else full
    stats = jax.local_devices()[0].memory_stats() or {}
    memory = stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    widest = max(model.vocab_size, model.d_ff, model.num_heads * model.d_kv)
    parameters = model.d_model * widest  # a part of them, for what is too large to be counted exactly
    if 4 * parameters < memory:
        shapes = jax.tree.leaves(model_of(config.model).abstract_params())
        parameters = sum(math.prod(x.shape) for x in shapes)
    own, share = 4 * rows // devices, devices if config.split_parameters else 1
    what, bytes_each = "the parameters and their gradients", 8
    if config.lora_rank:
        what, bytes_each = "the parameters", 2 if config.lora_base == "bfloat16" else 4
    needed = {what: bytes_each * parameters / share,
              "the logits": own * task.max_target_length * model.vocab_size,
              "a layer's attention scores": own * model.num_heads * task.max_source_length**2}
    what, most = max(needed.items(), key=lambda item: item[1])
    if most > memory:
        raise ValueError(f"{what} need {most / 2**30:,.1f} GiB on each device, which has "
                         f"{memory / 2**30:,.1f} ({parameters:,} parameters; batches of {rows} rows of "
                         f"{task.max_source_length}/{task.max_target_length} tokens): take a smaller model, "
                         "lower the task's limits, or take more devices with --split-parameters.")
