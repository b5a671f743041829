"""A training step: the loss, its gradient and the update."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from speccascade_jax.config import TrainConfig
from speccascade_jax.core.protocols import NO_TOKEN
from speccascade_jax.models import Model, NetworkConfig
from speccascade_jax.parallel import parameter_sharding, split_rows, tree_sharding
from speccascade_jax.training.data import Batch
from speccascade_jax.training.distillation import distillation_loss, on_policy_texts, progress
from speccascade_jax.training.exits import joined, member_loss, split
from speccascade_jax.training.kept_states import KeptStates
from speccascade_jax.training.lora import adapted, shapes_of
from speccascade_jax.training.losses import token_loss

Array = jax.Array


class Steps(NamedTuple):
    """The compiled parts of a training step."""

    gradients: Callable[..., Any]  # (params, batch, number, teacher_params, frozen states if they are kept,
    # whether its targets are the model's own) -> summed gradients, loss, tokens
    # (params, batch, teacher_params) -> what the loss reads of the frozen model, in the training's dtype
    frozen_states: Callable[..., Any]
    # (params, batch, number) -> the batch with targets that the model writes
    on_policy_texts: Callable[..., Any]
    update: Callable[..., Any]  # (params, opt_state, gradients, tokens) -> params, opt_state, their norm
    losses: Callable[..., Any]  # (params, batch, teacher_params) -> summed loss, tokens
    finite: Callable[..., Any]  # any pytree -> whether all its numbers are finite


def make_steps(
    model: Model,
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    teacher: Model | None = None,
    eos_id: int = NO_TOKEN,
) -> Steps:
    """Makes the compiled parts of a training step. Gradients are summed over tokens, so that batches of
    several sizes add up to one step. Gradients and the optimizer's state cover only the trained parameters.
    eos_id ends the texts that the model writes.

    Dropout and the texts that the model writes are functions of (seed, batch number).
    """

    network = isinstance(config.model, NetworkConfig)
    taught_by: Any = model if network else teacher

    def forward(model, params, batch, key=None):
        return model.forced(params, batch.source, batch.source_length, batch.target, key)

    def frozen_states(params, batch: Batch, teacher_params):
        read = taught_by.full_pass if network else taught_by.forced_states
        held = params if network else teacher_params
        states = read(held, batch.source, batch.source_length, batch.target)
        return jax.tree.map(lambda x: x.astype(config.dtype), states)

    def model_loss(params, batch: Batch, teacher_params, key=None, number=None, states=None, on_policy=False):
        """The training loss or, without a key, the evaluation loss, which has no dropout and no
        regularisation."""
        train = key is not None
        logits = forward(model, adapted(config, params), batch, key)
        total, count = token_loss(
            logits,
            batch.target,
            batch.target_length,
            label_smoothing=config.label_smoothing if train else 0.0,
            z_loss=config.z_loss if train else 0.0,
        )
        share = 1.0 if on_policy else config.distillation  # the model's own texts are no data
        if teacher is not None and share:
            if states is None:
                states = taught_by.forced_states(
                    teacher_params, batch.source, batch.source_length, batch.target
                )
            distilled = distillation_loss(
                logits,
                taught_by.head_logits(teacher_params, states),
                batch.target_length,
                config.divergence,
                config.method,
                config.alpha,
                progress(config, number),
            )
            total = (1.0 - share) * total + share * distilled
        return total, count

    def written(params, batch: Batch, number):
        key = jax.random.fold_in(jax.random.key(config.seed), number)
        return on_policy_texts(model, adapted(config, params), batch, key, eos_id)

    def gradients(params, batch: Batch, number, teacher_params, states=None, on_policy=False):
        trained, frozen = split(config, params)
        states = jax.tree.map(lambda x: x.astype(jnp.float32), states)

        def loss_sum(trained):
            key = jax.random.fold_in(jax.random.key(config.seed, impl="rbg"), number)
            params = joined(trained, frozen)
            if network:
                return member_loss(model, config, params, batch, key, number, states)
            return model_loss(params, batch, teacher_params, key, number, states, on_policy)

        (loss, count), grads = jax.value_and_grad(loss_sum, has_aux=True)(trained)
        return grads, loss, count

    def update(params, opt_state, grads, count):
        trained, frozen = split(config, params)
        grads = jax.tree.map(lambda g: g / count, grads)
        updates, opt_state = optimizer.update(grads, opt_state, trained)
        return joined(optax.apply_updates(trained, updates), frozen), opt_state, optax.tree.norm(grads)

    def losses(params, batch, teacher_params=None):
        if network:
            return member_loss(model, config, params, batch)
        return model_loss(params, batch, teacher_params)

    def finite(tree):
        return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()

    shapes = shapes_of(config, model)
    trained = split(config, shapes)[0]
    at, grads_at, opt_at = (
        tree_sharding(mesh, tree, config.split_parameters)
        for tree in (shapes, trained, jax.eval_shape(optimizer.init, trained))
    )
    whole = parameter_sharding(mesh, (), split=False)
    return Steps(
        jax.jit(gradients, out_shardings=(grads_at, whole, whole), static_argnames="on_policy"),
        jax.jit(frozen_states),
        jax.jit(written),
        jax.jit(update, out_shardings=(at, opt_at, whole), donate_argnums=(0, 1)),
        jax.jit(losses, out_shardings=whole),
        jax.jit(finite, out_shardings=whole),
    )


def one_step(
    steps: Steps,
    params: nnx.State,
    opt_state: Any,
    batches: Iterator[Batch],
    step: int,
    config: TrainConfig,
    mesh: Mesh,
    teacher_params: Any,
    kept: KeptStates | None = None,
) -> tuple[nnx.State, Any, Array, Array, int]:
    """Makes one update from the next config.accumulate batches. Returns params, opt_state, loss, gradient
    norm and the number of data tokens. A share config.on_policy of the batches, chosen by (seed, number),
    gets targets that the model writes. `kept`: the frozen model's states, if they are kept."""
    sums: Any = None
    tokens = 0
    for number in range(step * config.accumulate, (step + 1) * config.accumulate):
        batch = next(batches)
        tokens += int(batch.target_length.sum())
        on_policy = bool(np.random.default_rng([config.seed, 2, number]).random() < config.on_policy)
        placed = split_rows(mesh, batch)
        if on_policy:
            placed = steps.on_policy_texts(params, placed, jnp.uint32(number))
        states = None
        if kept is not None:
            compute = partial(steps.frozen_states, params, placed, teacher_params)
            states = split_rows(mesh, kept.of(number, compute))
        summed = steps.gradients(
            params, placed, jnp.uint32(number), teacher_params, states, on_policy=on_policy
        )
        sums = summed if sums is None else jax.tree.map(jnp.add, sums, summed)
    grads, loss, count = sums
    params, opt_state, norm = steps.update(params, opt_state, grads, count)
    return params, opt_state, loss / count, norm, tokens
