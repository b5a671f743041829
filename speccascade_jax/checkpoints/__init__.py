"""load(path) recognises a checkpoint's format by what lies in its folder; save() writes three of the four."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from speccascade_jax.checkpoints import deepmind, huggingface, native, t5x, tokenizer_files
from speccascade_jax.checkpoints.arrays import Placement, Sharding, reason
from speccascade_jax.models import Config, Model, model_of

FORMATS = {"huggingface": huggingface.save, "t5x": t5x.save, "native": native.export}


class Checkpoint(NamedTuple):
    model: Model
    params: nnx.State
    tokenizer: Path | None  # spiece.model, tokenizer.model or tokenizer.json; T5X's own folders have neither
    path: str

    def tokenizer_file(self) -> Path:
        """The tokenizer. Raises ValueError with the remedy where the checkpoint came without one."""
        if self.tokenizer is None:
            raise ValueError(missing_tokenizer(self.path))
        return self.tokenizer


def is_remote(path: str | Path) -> bool:
    return str(path).startswith(("hf://", "gs://"))


def from_hub(name: str) -> str:
    """The local copy of a Hugging Face model, fetched where it is not there yet.

    Raises ValueError where the optional huggingface_hub or the hub itself is out of reach.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(f"to fetch {name} from the hub: pip install 'speccascade_jax[hub]'.") from None
    try:
        wanted = ["*.safetensors*", "config.json", *tokenizer_files.NAMES]
        return snapshot_download(name, allow_patterns=wanted)
    except Exception as error:  # the hub's client raises many kinds, from DNS to authorisation
        raise ValueError(f"cannot fetch {name} from the Hugging Face hub ({reason(error)}); give a local "
                         "folder instead.") from None


def load(path: str | Path, dtype: Any = jnp.float32, sharding: Sharding | None = None,
         config: Config | None = None, packed: bool = False) -> Checkpoint:
    """A run of scripts/finetune.py (Orbax), a Hugging Face folder (safetensors), a T5X directory, or a
    Gemma 2 as DeepMind publishes it.

    hf://ORGANISATION/NAME is fetched from the hub; gs:// is read in place (T5X, or Orbax with gcsfs).
    Parameters come in `dtype`, each placed by `sharding(path, shape)` where given. With `config` (a
    preset, say) the model must have that shape, dropout aside. `packed` makes them what decoding reads
    fastest, fit for nothing else.
    Raises ValueError saying what is missing, damaged or does not fit.
    """
    path, folder = str(path), Path(path)
    if path.startswith("hf://"):
        folder = Path(from_hub(path.removeprefix("hf://")))
    place = Placement(dtype, sharding, packed)
    found: tuple[Model, nnx.State]
    if path.startswith("gs://"):
        if t5x.exists(path):
            found, tokenizer = t5x.load(path, place), None
        else:
            remote = native.remote(path)
            found, tokenizer = native.load(remote, place), tokenizer_files.find(remote)
    else:
        found, tokenizer = load_local(folder, place), tokenizer_files.find(folder)
    model, params = found
    if config is not None:
        check_shape(path, model.config, config)
    return Checkpoint(model_for(model.config, dtype), params, tokenizer, path)


def model_for(config: Config, dtype: Any) -> Model:
    """The model of that shape for parameters in `dtype`: float32, bfloat16 or int8."""
    name = jnp.dtype(dtype).name
    cache = "float32" if jax.default_backend() == "cpu" or name == "float32" else "bfloat16"
    return model_of(config, dtype=name, cache_dtype=cache)


def config_of(path: str) -> Config:
    """A model's shape, without its parameters. Raises ValueError where no file of the folder tells it."""
    folder = Path(from_hub(path.removeprefix("hf://"))) if path.startswith("hf://") else Path(path)
    for name, read in (("model.json", native.read_config), ("config.json", huggingface.read_config),
                       ("_METADATA", deepmind.read_config)):
        if (folder / name).is_file():
            return read(folder)
    raise ValueError(f"no file of {path} tells the model's shape: convert it with scripts/convert.py first.")


def tokenizer_file(path: str) -> Path:
    """The tokenizer that lies in a checkpoint's folder. Raises ValueError where there is none."""
    folder = Path(from_hub(path.removeprefix("hf://"))) if path.startswith("hf://") else Path(path)
    found = None if path.startswith("gs://") else tokenizer_files.find(folder)
    if found is None:
        raise ValueError(missing_tokenizer(path))
    return found


def missing_tokenizer(path: str) -> str:
    return (f"{path} has no tokenizer: copy the model's spiece.model, tokenizer.model or tokenizer.json "
            "there, or name the file with --tokenizer.")


def load_local(folder: Path, place: Placement) -> tuple[Model, nnx.State]:
    """Model and parameters of a local folder of any format."""
    if not folder.is_dir():
        raise ValueError(f"there is no checkpoint folder {folder}.")
    if (folder / "model.json").is_file():
        return native.load(folder, place)
    if (folder / "config.json").is_file():
        return huggingface.load(folder, place)
    if (folder / "checkpoint").is_file():
        return t5x.load(str(folder), place)
    if (folder / "_METADATA").is_file():
        return deepmind.load(folder, place)
    raise ValueError(f"{folder} is no checkpoint: neither a model.json (ours), a config.json (Hugging Face), "
                     "a file `checkpoint` (T5X) nor _METADATA (DeepMind's Gemma) is in it.")


def check_shape(path: str, found: Config, expected: Config) -> None:
    """Raises ValueError naming the fields, dropout's aside, in which two configs differ."""
    a, b = ({"family": c.family, **dataclasses.asdict(c)} for c in (found, expected))
    different = [f"{name} is {a[name]}, not {b.get(name)}" for name in a
                 if a[name] != b.get(name) and name != "dropout_rate"]
    if different:
        raise ValueError(f"{path} holds a model of another shape than asked for: {'; '.join(different)}.")


def check_absent(path: str | Path) -> None:
    """Raises ValueError where save() would find its folder taken."""
    if Path(path).exists():
        raise ValueError(f"{path} exists already: delete it or choose another folder.")


def save(path: str | Path, checkpoint: Checkpoint, to: str, dtype: Any = jnp.float32) -> None:
    """Writes a checkpoint in format `to` (a key of FORMATS) and `dtype`, its tokenizer along with it.

    The folder appears when it is complete. Raises ValueError where it exists already or cannot be written.
    """
    check_absent(path)
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        FORMATS[to](beside, checkpoint.model, checkpoint.params, dtype)
        if checkpoint.tokenizer is not None:
            tokenizer_files.copy(checkpoint.tokenizer, beside)
        beside.rename(path)
    except Exception as error:  # each format's library has its own kinds for a full disk
        raise ValueError(f"cannot write {path}: {reason(error)}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
