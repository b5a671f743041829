"""Our own checkpoints: an Orbax directory a run owns, with the model's shape and its tokenizer.

    <run>/model.json      the model's family and shape
    <run>/spiece.model    the vocabulary, or tokenizer.json
    <run>/latest/<step>/  params, optimizer    (Orbax; what a killed run resumes from)
    <run>/best/<step>/    params               (lowest validation loss)

Orbax writes a step beside its place and renames it, so that a kill leaves the previous one whole.
"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from speccascade_jax.checkpoints import vocabulary
from speccascade_jax.checkpoints.arrays import Sharding, reason
from speccascade_jax.models import FAMILIES, Config, Model, model_of

if TYPE_CHECKING:  # Orbax takes as long to import as all the rest
    import orbax.checkpoint as ocp


def manager(directory: Path, *, best: str | None = None) -> "ocp.CheckpointManager":
    """A manager that keeps one step under `directory`: the latest, or the lowest in metric `best`."""
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, enable_async_checkpointing=False, create=True,
        best_fn=(lambda metrics: metrics[best]) if best else None, best_mode="min")
    return ocp.CheckpointManager(directory.resolve(), options=options)


def describe(run: Path, config: Config, tokenizer: Path | None) -> None:
    """Writes what load() needs beside the parameters."""
    run.mkdir(parents=True, exist_ok=True)
    shape = {"family": config.family, **dataclasses.asdict(config)}
    (run / "model.json").write_text(json.dumps(shape, indent=1) + "\n")
    if tokenizer is not None:
        vocabulary.copy(tokenizer, run)


def restore(steps: "ocp.CheckpointManager", item: str, like: Any) -> Any:
    """`item` of the newest step, with the shapes and dtypes of the pytree `like`."""
    import orbax.checkpoint as ocp

    args = ocp.args.Composite(**{item: ocp.args.StandardRestore(like)})
    return steps.restore(steps.latest_step(), args=args)[item]


def save(steps: "ocp.CheckpointManager", step: int, items: dict[str, Any],
         metrics: dict[str, float] | None = None) -> None:
    """Saves the pytrees `items` as `step`, unless a killed run has saved that step before.

    Raises ValueError where it cannot be written; older steps stay whole.
    """
    import orbax.checkpoint as ocp

    if step in steps.all_steps():
        return
    args = ocp.args.Composite(**{name: ocp.args.StandardSave(item) for name, item in items.items()})
    try:
        steps.save(step, args=args, metrics=metrics)
    except Exception as error:  # Orbax has many kinds
        raise ValueError(f"could not save step {step} in {steps.directory} ({reason(error)}); earlier saves "
                         "are whole: make room and start again.") from None


def read_config(run: Path) -> Config:
    """The model's shape. Raises ValueError where model.json is damaged."""
    try:
        shape = json.loads((run / "model.json").read_text())
        return FAMILIES[shape.pop("family", "t5")](**shape)
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{run / 'model.json'} is damaged: {error}") from None


def load(run: Path, dtype: Any = jnp.float32, sharding: Sharding | None = None) -> tuple[Model, nnx.State]:
    """The best parameters of a run (the latest if none was evaluated) in `dtype`."""
    model = model_of(read_config(run))
    # Wherever it was saved from, it is wanted here.
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    params = model.abstract_params()
    flat = {path: jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding(path, x.shape) if sharding else here)
            for path, x in nnx.to_flat_state(params)}
    for kind in ("best", "latest"):
        if not (run / kind).is_dir():
            continue
        steps = manager(run / kind)
        if steps.latest_step() is None:
            continue
        like = nnx.to_pure_dict(nnx.from_flat_state(flat))
        try:
            pure = restore(steps, "params", like)
        except Exception as error:  # Orbax has many kinds, a bare Exception for data files among them
            raise ValueError(f"{run / kind}: the checkpoint is incomplete or damaged ({reason(error)})."
                             ) from None
        nnx.replace_by_pure_dict(params, pure)
        return model, params
    raise ValueError(f"{run} holds no finished checkpoint; run scripts/finetune.py to the first save.")


def export(run: Path, model: Model, params: nnx.State, dtype: Any = jnp.float32) -> None:
    """Writes a run directory with the parameters in `dtype` as its latest step, 0."""
    describe(run, model.config, None)
    with manager(run / "latest") as steps:
        save(steps, 0, {"params": jax.tree.map(lambda x: x.astype(dtype), nnx.to_pure_dict(params))})


def remote(path: str) -> Any:
    """A run at gs://, as a path. Raises ValueError where it holds none or gcsfs is not installed."""
    from etils import epath

    run = epath.Path(path)
    try:
        found = (run / "model.json").is_file()
    except ImportError:
        raise ValueError(f"{path} is no T5X checkpoint; to read a run of ours at gs://: pip install gcsfs."
                         ) from None
    if not found:
        raise ValueError(f"{path} is no checkpoint: neither a file `checkpoint` (T5X) nor a model.json "
                         "(ours) is in it.")
    return run
