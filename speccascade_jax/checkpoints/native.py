"""Our own checkpoints: an Orbax directory a run owns, with the model's shape and its tokenizer.

    <run>/model.json      the T5Config
    <run>/spiece.model    the vocabulary
    <run>/latest/<step>/  params, optimizer    (Orbax; what a killed run resumes from)
    <run>/best/<step>/    params               (lowest validation loss)

Orbax writes a step beside its place and renames it, so that a kill leaves the previous one whole.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from speccascade_jax.models.t5 import T5Config, T5Model


def manager(directory: Path, *, best: str | None = None) -> ocp.CheckpointManager:
    """A manager that keeps one step under `directory`: the latest, or the lowest in metric `best`."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, enable_async_checkpointing=False, create=True,
        best_fn=(lambda metrics: metrics[best]) if best else None, best_mode="min")
    return ocp.CheckpointManager(directory.resolve(), options=options)


def describe(run: Path, config: T5Config, tokenizer: Path) -> None:
    """Writes what load() needs beside the parameters."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "model.json").write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n")
    if tokenizer.resolve() != (run / "spiece.model").resolve():
        shutil.copyfile(tokenizer, run / "spiece.model")


def restore(steps: ocp.CheckpointManager, item: str, like: Any) -> Any:
    """`item` of the newest step, with the shapes and dtypes of the pytree `like`."""
    args = ocp.args.Composite(**{item: ocp.args.StandardRestore(like)})
    return steps.restore(steps.latest_step(), args=args)[item]


def load(run: Path) -> tuple[T5Model, nnx.State]:
    """The best parameters of a run (the latest if none was evaluated), as host arrays."""
    try:
        model = T5Model(T5Config(**json.loads((run / "model.json").read_text())))
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{run / 'model.json'} is damaged: {error}") from None
    for kind in ("best", "latest"):
        if not (run / kind).is_dir():
            continue
        steps = manager(run / kind)
        if steps.latest_step() is None:
            continue
        try:
            pure = restore(steps, "params", nnx.to_pure_dict(model.abstract_params()))
        except (ValueError, OSError, KeyError) as error:
            raise ValueError(f"{run / kind}: the checkpoint is incomplete or damaged ({error}).") from None
        params = model.abstract_params()
        nnx.replace_by_pure_dict(params, jax.tree.map(np.asarray, pure))
        return model, params
    raise ValueError(f"{run} holds no finished checkpoint; run scripts/finetune.py to the first save.")
