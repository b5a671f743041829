"""Trains versions of one drafter side by side in one program, to compare what they learn from."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from speccascade_jax.config import TrainConfig
from speccascade_jax.models import Model, model_of
from speccascade_jax.parallel import make_mesh
from speccascade_jax.tokenizers.tokenizer import Tokenizer
from speccascade_jax.training.data import Batch, TrainingBatches
from speccascade_jax.training.distillation import distillation_loss, progress
from speccascade_jax.training.optimizer import make_optimizer
from speccascade_jax.training.preparation import find_tokenizer, first_parameters, load_teacher

Array = jax.Array
Lesson = tuple[str, str, float]
"""What a version learns from: a divergence, and the rule and lenience that define its target."""


def train_side_by_side(
    config: TrainConfig,
    lessons: Sequence[Lesson],
    seeds: Sequence[int],
    track: Callable[[Sequence[int], str], Any],
) -> tuple[Model, dict[tuple[Lesson, int], nnx.State]]:
    """Trains `config` once for each lesson and seed. Returns the model and the parameters of each version.

    All versions start from config.init and learn from config.teacher's distributions alone, on the task's
    targets and without dropout, whatever config.distillation and config.on_policy are. Versions with the same
    seed see the same batches, all padded to the task's limits, so that one program trains every version.
    """
    mesh = make_mesh()
    tokenizer = Tokenizer(find_tokenizer(config))
    teacher, teacher_params, _ = load_teacher(str(config.teacher), config, tokenizer, mesh)
    model, optimizer = model_of(config.model, dtype=config.dtype), make_optimizer(config)
    first = first_parameters(config, model, mesh)
    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(seeds), len(lessons), *x.shape)), first)
    opt_state = jax.jit(each(optimizer.init))(params)
    data = TrainingBatches(config.task, tokenizer, config.batch_tokens, seed=0, buckets=1)
    streams = [data.reshuffled(seed).from_step(0) for seed in seeds]
    step = make_step(config, model, teacher, optimizer, lessons)
    for number in track(range(config.steps), "training"):
        batch = Batch(*map(np.stack, zip(*(next(stream) for stream in streams), strict=True)))
        params, opt_state = step(params, opt_state, teacher_params, batch, jnp.uint32(number))
    versions = {
        (lesson, seed): jax.tree.map(lambda x, s=s, n=n: x[s, n], params)
        for s, seed in enumerate(seeds)
        for n, lesson in enumerate(lessons)
    }
    return model, versions


def each(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one version, for arguments [seeds, lessons, ...]."""
    return jax.vmap(jax.vmap(function))


def make_step(
    config: TrainConfig,
    model: Model,
    teacher: Model,
    optimizer: optax.GradientTransformation,
    lessons: Sequence[Lesson],
) -> Callable[..., Any]:
    """Returns a compiled update of all versions: (params, optimizer state, teacher's params, batch [seeds,
    ...], number of the batch) -> params, optimizer state."""

    def logits_of(model: Any, params: nnx.State, batch: Batch) -> Array:
        return model.forced(params, batch.source, batch.source_length, batch.target)

    def losses(params: nnx.State, batch: Batch, taught: Array, number: Array) -> Array:
        """The sum over the lessons of one seed. A version's gradient is that of its own loss."""
        logits = jax.vmap(lambda params: logits_of(model, params, batch))(params)
        done = progress(config, number)
        return jnp.sum(
            jnp.stack(
                [
                    distillation_loss(logits[n], taught, batch.target_length, *lesson, done)
                    for n, lesson in enumerate(lessons)
                ]
            )
        ) / jnp.sum(batch.target_length)

    def step(params, opt_state, teacher_params, batch: Batch, number):
        taught = jax.vmap(lambda batch: logits_of(teacher, teacher_params, batch))(batch)
        grads = jax.vmap(jax.grad(losses), in_axes=(0, 0, 0, None))(params, batch, taught, number)
        updates, opt_state = each(optimizer.update)(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(step, donate_argnums=(0, 1))
