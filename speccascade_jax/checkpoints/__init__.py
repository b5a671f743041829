"""load(path) recognises a checkpoint's format by the files in its folder; save() writes three of the four."""

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from speccascade_jax.checkpoints import assistant, dflash, eagle, huggingface, native, t5x, tokenizer_files
from speccascade_jax.checkpoints.arrays import Placement, Sharding, reason
from speccascade_jax.checkpoints.families import MODEL_FAMILIES
from speccascade_jax.checkpoints.files import checked_path, exists
from speccascade_jax.core.errors import FieldError
from speccascade_jax.models import Config, Model, full_of, model_of, stacking
from speccascade_jax.models.assistant import AssistantModel
from speccascade_jax.models.decoder import DecoderModel
from speccascade_jax.models.dflash import DFlashModel
from speccascade_jax.models.eagle import EagleModel
from speccascade_jax.models.gemma4 import Gemma4Model
from speccascade_jax.models.members import beneath, member
from speccascade_jax.models.quantization import PackedKernel, wants_packing


def load_native(run: Path, place: Placement) -> tuple[Model, nnx.State]:
    """native.load(), with a network's full model from the folder that it names. Raises ValueError."""
    name = native.full_at(run)
    if name is None:
        return native.load(run, place)
    folder, network = local_folder(run.parent / name), native.read_config(run)
    load_full, read_config = readers_of(folder)
    check_shape(str(folder), read_config(folder), full_of(network))
    return native.load(run, place, load_full(folder, place)[1])


READERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "model.json": (load_native, native.read_config),
    "config.json": (huggingface.load, huggingface.read_config),
    **{
        family.published_file: (family.load_published, family.read_published_config)
        for family in MODEL_FAMILIES.values()
        if family.published_file is not None
    },
}
"""The file that identifies a format -> functions that read a folder, and only the model's config."""
FORMATS: dict[str, Callable[..., None]] = {
    "huggingface": huggingface.save,
    "t5x": t5x.save,
    "native": native.export,
}
UNFINISHED = ".unfinished"  # suffix of a folder that save() has not completed
SAVED = "float32", "bfloat16", "float16"
LOADED = *SAVED, "int8"


class Checkpoint(NamedTuple):
    model: Any  # a LanguageModel; for a network, a Member
    params: nnx.State  # for a network, those of all members
    tokenizer: Path | None  # spiece.model, tokenizer.model or tokenizer.json; T5X has none
    path: str

    def tokenizer_file(self) -> Path:
        """The tokenizer. Raises ValueError, with the remedy, if the checkpoint has none."""
        if self.tokenizer is None:
            raise ValueError(missing_tokenizer(self.path))
        return self.tokenizer


def is_remote(path: str | Path) -> bool:
    return str(path).startswith(("hf://", "gs://"))


def at_hub(path: str | Path) -> str:
    """The path in the form that load() takes. OWNER/NAME is a model on the Hugging Face hub unless such a
    folder exists."""
    name = str(path)
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not Path(split_member(name)[0]).exists()
    return f"hf://{name}" if is_name else name


def from_hub(name: str) -> str:
    """The local copy of a Hugging Face model, downloaded if necessary.

    Raises ValueError if the optional huggingface_hub is not installed or the hub cannot be reached.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(f"to fetch {name} from the hub: pip install 'speccascade_jax[hub]'.") from None
    try:
        wanted = ["*.safetensors*", "config.json", *tokenizer_files.NAMES, *tokenizer_files.COMPANIONS]
        twice = ["consolidated*", "original/*"]  # copies of the weights in the authors' format
        folder = snapshot_download(name, allow_patterns=wanted, ignore_patterns=twice)
        if not any(Path(folder).glob("*.safetensors")):
            folder = snapshot_download(name, allow_patterns=[*wanted, huggingface.TORCH_FILE])
        return folder
    except Exception as error:  # the hub's client raises many types, from DNS errors to authorisation
        raise ValueError(
            f"cannot fetch {name} from the Hugging Face hub ({reason(error)}); give a local folder instead."
        ) from None


def local_folder(path: str | Path) -> Path:
    """The local folder of a checkpoint, downloaded from the hub if necessary. Raises ValueError if there is
    none."""
    folder = checked_path(path)
    if str(path).startswith("hf://"):
        folder = Path(from_hub(str(path).removeprefix("hf://")))
    if not exists(folder):
        raise ValueError(f"there is no checkpoint folder {folder}.")
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: name the checkpoint folder that it lies in.")
    return folder


def readers_of(folder: Path) -> tuple[Any, Any]:
    """The functions that read a local folder, and only its model's config. Raises ValueError."""
    for name, readers in READERS.items():
        if exists(folder / name):
            return readers
    if exists(folder / "adapter_config.json"):
        raise ValueError(
            f"{folder} is an adapter without its model: merge it into the model it was "
            f"trained on "
            "(peft's merge_and_unload), and save that."
        )
    raise ValueError(
        f"{folder} is not a checkpoint: neither a model.json (ours), a config.json (Hugging Face), "
        "a file `checkpoint` (T5X) nor _METADATA (DeepMind's Gemma) is in it."
    )


def load(
    path: str | Path,
    dtype: Any = jnp.float32,
    sharding: Sharding | None = None,
    config: Config | None = None,
    packed: bool = False,
    track: Callable[[Iterable[Any], int], Iterable[Any]] | None = None,
) -> Checkpoint:
    """Loads a training run (Orbax), a Hugging Face folder (safetensors), a T5X directory, or a Gemma in
    DeepMind's format.

    FOLDER@4 is the exit after 4 layers of the network in FOLDER, and FOLDER@drafter is the drafter that reads
    its verifier's encoder; FOLDER alone is a network's full model. hf://ORGANISATION/NAME is downloaded from
    the hub; gs:// is read in place (T5X, or Orbax with gcsfs). Parameters have `dtype`, and are placed by
    `sharding(path, shape)` if given. With `config` (for example a preset), the model must have that shape,
    except for dropout. `packed` parameters have the layout that decodes fastest, and can only be used for
    decoding. `track(arrays, number of arrays)` shows progress. Raises ValueError naming what is missing,
    damaged or does not fit.
    """
    path, name = split_member(path)
    place = Placement(checked_dtype(dtype, LOADED), sharding, packed, track)
    if name is not None:  # before reading anything large
        member(model_for(config_of(path), dtype), name, path)
    loaded: tuple[Any, nnx.State]
    if not path.startswith("gs://"):
        folder = local_folder(path)
        loaded, tokenizer = readers_of(folder)[0](folder, place), tokenizer_files.find(folder)
    elif t5x.exists_at(path):
        loaded, tokenizer = t5x.load(path, place), None
    else:
        remote = native.remote(path)
        loaded, tokenizer = native.load(remote, place), tokenizer_files.find(remote)
    model, params = loaded
    if config is not None:
        check_shape(path, model.config, config)
    return Checkpoint(member(model_for(model.config, dtype), name, path), params, tokenizer, path)


def load_all(
    paths: Sequence[str | Path],
    dtype: Any = jnp.float32,
    sharding: Callable[[str], Sharding | None] = lambda folder: None,
    decoding: bool = False,
) -> list[Checkpoint]:
    """Loads each of `paths` with load(). Members of one folder share its parameters, which are read once.

    sharding(folder): the sharding of a folder's parameters. decoding: parameters have the layout that decodes
    fastest on this machine (packed kernels or stacked layers), and can only be used for decoding.
    """
    read: dict[str, Checkpoint] = {}
    places = [split_member(path) for path in paths]
    for path, (folder, _) in zip(paths, places, strict=True):
        if folder not in read:
            read[folder] = load(path, dtype, sharding(folder), packed=decoding and wants_packing(dtype))
    places = with_attached(read, places)
    for folder, checkpoint in read.items():
        whole, params = getattr(checkpoint.model, "member_of", checkpoint.model), checkpoint.params
        if decoding and stacking.wants_stacking():
            whole, params = stacking.stacked(whole, params)
        read[folder] = checkpoint._replace(model=whole, params=params)
    return [read[folder]._replace(model=member(read[folder].model, name, folder)) for folder, name in places]


class Attached(NamedTuple):
    """A drafter that only works as a member of one network with its verifier."""

    name: str
    verifier: type  # the class of the model that it drafts for
    verifier_name: str
    joined: Callable[[Any, Any, Any], Any]
    """joined(where, drafter, verifier): the network of both. Raises ValueError for another verifier."""


ATTACHED: dict[type, Attached] = {
    AssistantModel: Attached("an assistant", Gemma4Model, "Gemma 4", assistant.joined),
    EagleModel: Attached("an EAGLE-3 head", DecoderModel, "decoder-only model", eagle.joined),
    DFlashModel: Attached("a DFlash drafter", DecoderModel, "decoder-only model", dflash.joined),
}


def with_attached(
    read: dict[str, Checkpoint], places: list[tuple[str, str | None]]
) -> list[tuple[str, str | None]]:
    """Joins drafters of ATTACHED and their verifiers to networks, which replace the verifiers in `read`.
    Returns the new `places` of all models, smallest first. Raises ValueError for a drafter of another
    verifier."""
    joined = list(places)
    for number, (folder, _) in enumerate(places):
        drafter = read[folder]
        kind = ATTACHED.get(type(drafter.model))
        if kind is None:
            continue
        above = places[number + 1][0] if number + 1 < len(places) else None
        verifier = None if above is None else read[above]
        if above is None or verifier is None or not isinstance(verifier.model, kind.verifier):
            raise ValueError(
                f"{folder} is {kind.name}, which only drafts for the {kind.verifier_name} that it was "
                "trained with: list that model's folder right after it, as the verifier."
            )
        model = kind.joined(folder, drafter.model, verifier.model)
        params = beneath("verifier", verifier.params) | beneath("drafter", drafter.params)
        read[above] = verifier._replace(model=model, params=nnx.from_flat_state(params))
        joined[number : number + 2] = [(above, "drafter"), (above, "verifier")]
    for folder in {folder for folder, _ in places} - {folder for folder, _ in joined}:
        del read[folder]
    return joined


def split_member(path: str | Path) -> tuple[str, str | None]:
    """(folder, name) of FOLDER@NAME. The name is None if there is none or if a folder has that whole name."""
    folder, _, name = str(path).rpartition("@")
    is_folder = not is_remote(path) and exists(checked_path(path))
    return (str(path), None) if is_folder or not (folder and name) or "/" in name else (folder, name)


def checked_dtype(dtype: Any, known: tuple[str, ...]) -> Any:
    """Returns the dtype. Raises FieldError if it is not in `known`."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in known:
        raise FieldError("dtype", dtype, f"known: {', '.join(known)}.", f"weights cannot be {name}")
    return jnp.dtype(name)


def model_for(config: Config, dtype: Any) -> Model:
    """The model of that shape for parameters in `dtype`: float32, bfloat16 or int8."""
    name = jnp.dtype(dtype).name
    cache = "float32" if jax.default_backend() == "cpu" or name == "float32" else "bfloat16"
    return model_of(config, dtype=name, cache_dtype=cache)


def config_of(path: str) -> Config:
    """A model's config, read without its parameters. Raises ValueError if the folder has none."""
    path, _ = split_member(path)
    if path.startswith("gs://"):
        return t5x.read_config(path) if t5x.exists_at(path) else native.read_config(native.remote(path))
    folder = local_folder(path)
    return readers_of(folder)[1](folder)


def tokenizer_file(path: str) -> Path:
    """The tokenizer in a checkpoint's folder. Raises ValueError if it has none."""
    path, _ = split_member(path)
    tokenizer = None if path.startswith("gs://") else tokenizer_files.find(local_folder(path))
    if tokenizer is None:
        raise ValueError(missing_tokenizer(path))
    return tokenizer


def missing_tokenizer(path: str) -> str:
    return (
        f"{path} has no tokenizer: copy the model's spiece.model, tokenizer.model or tokenizer.json "
        "there, or give the file with --tokenizer."
    )


def check_shape(path: str, config: Config, expected: Config) -> None:
    """Raises ValueError naming the fields in which two configs differ, except for dropout."""
    a, b = (traverse_util.flatten_dict(native.shape_of(c), sep=".") for c in (config, expected))
    different = [
        f"{name} is {a[name]}, not {b.get(name)}"
        for name in a
        if a[name] != b.get(name) and not name.endswith("dropout_rate")
    ]
    if different:
        raise ValueError(
            f"{path} is a model of a different shape from the requested one: {'; '.join(different)}."
        )


def check_absent(path: str | Path) -> None:
    """Raises ValueError if the folder for save() already exists or cannot be created."""
    folder = checked_path(path).absolute()
    if os.path.lexists(folder):
        raise ValueError(f"{path} exists already: delete it or choose another folder.")
    parent = next(parent for parent in folder.parents if os.path.lexists(parent))
    if not parent.is_dir():
        raise ValueError(f"cannot write {path}: {parent} is not a folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write {path}: no permission to write in {parent}.")


def check_savable(config: Config, to: str) -> None:
    """Raises FieldError if format `to` does not support a model of that shape."""
    formats = MODEL_FAMILIES[config.family].formats
    if to not in formats:
        known = (
            f"{to} does not support {config.family} models" if to in FORMATS else f"there is no format {to!r}"
        )
        raise FieldError("to", to, f"choose one of: {', '.join(formats)}.", known)
    if to == "huggingface":
        MODEL_FAMILIES[config.family].describe(config)


def save(path: str | Path, checkpoint: Checkpoint, to: str, dtype: Any = jnp.float32) -> None:
    """Writes a checkpoint and its tokenizer in format `to` (a key of FORMATS) and `dtype`.

    The folder is created only once it is complete. Raises ValueError if it already exists or cannot be
    written.
    """
    check_absent(path)
    check_savable(checkpoint.model.config, to)
    dtype = checked_dtype(dtype, SAVED)
    if any(
        isinstance(x, PackedKernel)
        for x in jax.tree.leaves(checkpoint.params, is_leaf=lambda x: isinstance(x, PackedKernel))
    ):
        raise ValueError(
            f"{checkpoint.path} was loaded for decoding (packed, or int8), which no format "
            "supports: load it again in float32."
        )
    path = Path(path)
    beside = path.with_name(f".{path.name[:100]}.{os.getpid()}{UNFINISHED}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(path.parent)
        with locked_folder(beside):
            FORMATS[to](beside, checkpoint.model, checkpoint.params, dtype)
            if checkpoint.tokenizer is not None:
                tokenizer_files.copy(checkpoint.tokenizer, beside)
            beside.rename(path)
    except Exception as error:  # each format's library has its own exceptions for a full disk
        for pause in (0.1, 0.4):  # threads of the format's library may still be writing
            shutil.rmtree(beside, ignore_errors=True)
            time.sleep(pause)
        raise ValueError(f"cannot write {path}: {reason(error)}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Creates a folder that remove_unfinished() does not remove while this context is open. The kernel
    releases the lock when the process ends. On file systems without locks, nothing is removed."""
    handle = -1
    while handle < 0:
        folder.mkdir()
        with contextlib.suppress(FileNotFoundError):  # another process removed it before it was locked
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            if not folder.exists():
                os.close(handle)
                handle = -1
    try:
        yield
    finally:
        os.close(handle)


def remove_unfinished(parent: Path) -> None:
    """Removes unfinished folders that killed processes left in `parent`."""
    for folder in parent.glob(f".*{UNFINISHED}"):
        with contextlib.suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)
