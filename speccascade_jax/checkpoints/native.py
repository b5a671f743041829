"""Our own checkpoints: a run's Orbax directory, with the model's config and its tokenizer.

    <run>/model.json      the model's family and shape
    <run>/spiece.model    the vocabulary, or tokenizer.json
    <run>/latest/<step>/  params, optimizer    (Orbax; what a killed run resumes from)
    <run>/best/<step>/    params               (lowest validation loss)

A network exported next to its full model's folder holds only what that folder lacks; `full_at` in its
model.json is the folder's name.

Orbax writes a step next to its final place and then renames it, so a killed run leaves the previous step
intact.
"""

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from speccascade_jax.checkpoints import tokenizer_files
from speccascade_jax.checkpoints.arrays import (
    CHUNK,
    ParameterPath,
    Placement,
    Stored,
    check,
    checksum,
    open_arrays,
    open_directory,
    read_array,
    reason,
    stored_array,
    to_params,
)
from speccascade_jax.checkpoints.families import MODEL_FAMILIES, family_of
from speccascade_jax.checkpoints.fields import check_fields
from speccascade_jax.checkpoints.files import check_folder, checked_path, read_json, shown
from speccascade_jax.models import Config, Model, NetworkConfig, model_of
from speccascade_jax.models.members import beneath

if TYPE_CHECKING:  # importing Orbax takes as long as everything else
    import orbax.checkpoint as ocp


FULL_AT = "full_at"


def manager(directory: Path, *, best: str | None = None) -> "ocp.CheckpointManager":
    """A manager that keeps one step under `directory`: the latest, or the lowest in metric `best`."""
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(
        max_to_keep=1,
        enable_async_checkpointing=False,
        create=True,
        best_fn=(lambda metrics: metrics[best]) if best else None,
        best_mode="min",
    )
    return ocp.CheckpointManager(directory.resolve(), options=options)


def describe(run: Path, config: Config, tokenizer: Path | None, full_at: str | None = None) -> None:
    """Writes what load() needs in addition to the parameters."""
    run.mkdir(parents=True, exist_ok=True)
    shape = shape_of(config) | ({} if full_at is None else {FULL_AT: full_at})
    (run / "model.json").write_text(json.dumps(shape, indent=1) + "\n")
    if tokenizer is not None:
        tokenizer_files.copy(tokenizer, run)


def shape_of(config: Config) -> dict[str, Any]:
    """A config in the form of model.json, with its parts nested."""
    parts = MODEL_FAMILIES[config.family].parts
    return {
        "family": config.family,
        **dataclasses.asdict(config),
        **{name: shape_of(getattr(config, name)) for name in parts},
    }


def read_config(run: Path) -> Config:
    """The model's shape. Raises ValueError if model.json is missing or damaged."""
    shape = read_json(run / "model.json")
    shape.pop(FULL_AT, None)
    return config_from(run / "model.json", shape)


def full_at(run: Path) -> str | None:
    """The name of the folder next to `run` that holds a network's full model; None if that is in `run`.
    Raises ValueError for anything else."""
    where = run / "model.json"
    name = read_json(where).get(FULL_AT)
    if name is None:
        return None
    if not isinstance(name, str) or name == ".." or checked_path(name).name != name:
        raise ValueError(
            f"{where} is damaged: {FULL_AT} is {shown(name)}, not the name of a folder next to {run}."
        )
    if not isinstance(read_config(run), NetworkConfig):
        raise ValueError(f"{where} is damaged: one model has no {FULL_AT}.")
    return name


def config_from(where: Any, shape: dict[str, Any], within: bool = False) -> Config:
    """The inverse of shape_of(). Parts (`within`) are checked by the whole. Raises ValueError."""
    family = family_of(where, shape.pop("family", "t5"))
    unknown = sorted(shape.keys() - {field.name for field in dataclasses.fields(family.config)})
    if unknown:
        raise ValueError(f"{where} is damaged: {family.usual.family} has no field {shown(unknown[0])}.")
    for name, value in shape.items():
        if name in family.parts and isinstance(value, dict) and not within:
            shape[name] = config_from(f"{where}: {name}", value, within=True)
        elif isinstance(value, list):
            shape[name] = tuple(value)
    check_fields(where, family.config, shape, part=within, usual=family.usual)
    config = dataclasses.replace(family.usual, **shape)
    if not within:
        family.check(where, config)
    return config


def restore(steps: "ocp.CheckpointManager", item: str, like: Any) -> Any:
    """`item` of the newest step, with the shapes and dtypes of the pytree `like`. Raises ValueError."""
    import orbax.checkpoint as ocp

    args = ocp.args.Composite(**{item: ocp.args.StandardRestore(like)})
    try:
        return steps.restore(steps.latest_step(), args=args)[item]
    except Exception as error:  # Orbax raises many types, including Exception
        raise ValueError(
            f"{steps.directory / str(steps.latest_step())}: {item} is damaged or another run's "
            f"({reason(error)}); delete {steps.directory} to start over."
        ) from None


def dotted(path: ParameterPath) -> str:
    """Orbax's name for a parameter."""
    return ".".join(map(str, path))


def checksums(params: Any) -> dict[str, int]:
    """Name -> checksum of each parameter, except those split over several processes."""
    return {
        dotted(path): checksum(np.asarray(x))
        for path, x in traverse_util.flatten_dict(params).items()
        if x.is_fully_addressable or x.is_fully_replicated
    }


def save(
    steps: "ocp.CheckpointManager", step: int, items: dict[str, Any], metrics: dict[str, float] | None = None
) -> None:
    """Saves the pytrees `items`, which include `params`, as `step`, unless a killed run already saved that
    step.

    Raises ValueError if it cannot be written; older steps stay intact.
    """
    import orbax.checkpoint as ocp

    if step in steps.all_steps():
        return
    chunked = ocp.SaveArgs(chunk_byte_size=CHUNK)
    args = ocp.args.Composite(
        **{
            name: ocp.args.StandardSave(item, jax.tree.map(lambda _: chunked, item))
            for name, item in items.items()
        }
    )
    try:
        steps.save(step, args=args, metrics=metrics, custom_metadata={"crc32": checksums(items["params"])})
    except Exception as error:  # Orbax raises many types
        raise ValueError(
            f"could not save step {step} in {steps.directory} ({reason(error)}); earlier saves "
            "are whole: make room and start again."
        ) from None


def open_database(folder: str) -> Any:
    """The OCDBT database in which Orbax keeps an item's zarr arrays, as a TensorStore KvStore."""
    import tensorstore

    base = open_directory(folder).spec().to_json()
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()


def checksums_of(step: Path) -> dict[str, Any]:
    """Name -> checksum of a step's parameters, for those that have one."""
    where = step / "_CHECKPOINT_METADATA"
    described = read_json(where).get("custom_metadata")
    if described is None:
        return {}
    sums = described.get("crc32", {}) if isinstance(described, dict) else None
    if not isinstance(sums, dict):
        raise ValueError(f"{where} is damaged (its checksums are no object): fetch it again.")
    return sums


def read_params(step: Path, model: Model, place: Placement, full: nnx.State | None = None) -> nnx.State:
    """Reads the parameters of one step, one array at a time; Orbax would hold all of them twice. `full`: the
    parameters of a network's full model, which are then not read.

    Raises ValueError naming an array that is missing, damaged or of another shape than the model's.
    """
    folder = f"{step}/params"
    database = open_database(folder)
    try:
        stored = {key.decode(errors="replace").split("/")[0] for key in database.list().result()}
    except ValueError as error:
        raise ValueError(
            f"{folder}: its list of arrays is missing or damaged ({reason(error)}); fetch it again."
        ) from None
    # One by one and before the model is made, because model.json may claim more layers than memory can hold.
    full_arrays: dict[ParameterPath, Any] = {}
    if full is not None and isinstance(model.config, NetworkConfig):
        full_arrays = beneath(model.config.full_part, full)
    for path, _, _ in MODEL_FAMILIES[model.config.family].parameter_names(model.config):
        if path not in full_arrays and dotted(path) not in stored:
            raise ValueError(
                f"{folder}: the array {dotted(path)} is missing or damaged: it is another "
                "model's run, or model.json is damaged."
            )
    wanted = {
        path: (dotted(path), tuple(x.shape))
        for path, x in nnx.to_flat_state(model.abstract_params())
        if path not in full_arrays
    }
    arrays = open_arrays(folder, database, {name: name for name, _ in wanted.values()})
    for name, shape in wanted.values():
        if arrays[name].shape != shape:
            raise ValueError(
                f"{folder}: the model asks for {name} of shape {shape}, saved was one of shape "
                f"{arrays[name].shape}: it is another model's run, or model.json is damaged."
            )
    sums = checksums_of(step)

    def read() -> Iterator[tuple[ParameterPath, str, np.ndarray | Stored]]:
        for path, (name, shape) in wanted.items():
            if place.takes_part(path, shape):
                yield path, f"{folder}: {name}", stored_array(folder, name, arrays[name])
                continue
            array = read_array(folder, name, arrays[name])
            check(f"{folder}: {name}", array, sums.get(name))
            yield path, f"{folder}: {name}", array
            del array

    params = to_params(model, read(), place)
    return params if full is None else nnx.from_flat_state(dict(nnx.to_flat_state(params)) | full_arrays)


def latest_step(directory: Path) -> int | None:
    """The newest finished step under `directory`. It opens no manager, because a manager would wait for the
    other processes of a cluster, and only one process exports. Raises ValueError."""
    import orbax.checkpoint as ocp

    try:
        paths = ocp.utils.checkpoint_steps_paths(directory)
        return max((int(path.name) for path in paths if path.name.isdigit()), default=None)
    except Exception as error:  # Orbax raises many types
        raise ValueError(f"{directory} is damaged ({reason(error)}): fetch it again.") from None


def load(run: Path, place: Placement, full: nnx.State | None = None) -> tuple[Model, nnx.State]:
    """Model and best parameters of a run (the latest if none was evaluated); `full`: see read_params().
    Raises ValueError."""
    model = model_of(read_config(run))
    for kind in ("best", "latest"):
        if (run / kind).is_dir():
            if isinstance(run, Path):  # otherwise it is remote
                check_folder(run / kind)
            step = latest_step(run / kind)
            if step is not None:
                return model, read_params(run / kind / str(step), model, place, full)
    raise ValueError(f"{run} holds no finished checkpoint; run scripts/finetune.py to the first save.")


def export(
    run: Path, model: Model, params: nnx.State, dtype: Any = jnp.float32, full_at: str | None = None
) -> None:
    """Writes a run directory with the parameters in `dtype` as step 0. With `full_at`, only those parameters
    of a network are written that its full model, in the neighbouring folder of that name, lacks."""
    describe(run, model.config, None, full_at)
    if full_at is not None and isinstance(model.config, NetworkConfig):
        params = nnx.from_flat_state(
            {path: value for path, value in nnx.to_flat_state(params) if path[0] != model.config.full_part}
        )
    with manager(run / "latest") as steps:
        save(steps, 0, {"params": jax.tree.map(partial(stored, dtype), nnx.to_pure_dict(params))})


def stored(dtype: Any, array: Any) -> jax.Array:
    """The array in `dtype`; integers are not converted."""
    return jnp.asarray(array, None if jnp.issubdtype(array.dtype, jnp.integer) else dtype)


def remote(path: str) -> Any:
    """The path of a run at gs://. Raises ValueError if there is no run or gcsfs is not installed."""
    from etils import epath

    run = epath.Path(path)
    try:
        is_run = (run / "model.json").is_file()
    except ImportError:
        raise ValueError(
            f"{path} is not a T5X checkpoint; to read a run of ours at gs://: pip install gcsfs."
        ) from None
    if not is_run:
        raise ValueError(
            f"{path} is not a checkpoint: neither a file `checkpoint` (T5X) nor a model.json (ours) is in it."
        )
    return run
