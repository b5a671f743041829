"""Versions of a drafter that are trained in one program: each as if it were trained alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shapes import TINY_T5

from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.models import model_of
from speccascade_jax.parallel import make_mesh
from speccascade_jax.training.data import Batch
from speccascade_jax.training.optimizer import make_optimizer
from speccascade_jax.training.side_by_side import make_step
from speccascade_jax.training.steps import make_steps

T5 = dataclasses.replace(TINY_T5, dropout_rate=0.0)
LESSONS = [
    ("kl", "speculative", 0.0),
    ("kl", "opt", 0.1),
    ("lk_hybrid", "opt", 0.1),
    ("kl_to_lk", "opt", 0.1),
]
STEPS = 3


def batches_of(seed):
    rng = np.random.default_rng(seed)
    for _ in range(STEPS):
        source, target = (rng.integers(3, 90, (4, 9)).astype(np.int32) for _ in range(2))
        yield Batch(source, np.full(4, 9, np.int32), target, rng.integers(4, 10, 4).astype(np.int32))


def moves(params, first):
    """How far every parameter is from its start, in one array."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(first), strict=True)
    return np.concatenate([np.ravel(x - y) for x, y in pairs])


def alike(x, y):
    """The cosine of the angle between two arrays."""
    return x @ y / np.sqrt((x @ x) * (y @ y))


@pytest.mark.full
def test_a_version_is_trained_as_if_alone():
    """Whatever the divergences and rules of the others, and the seed that it shares a program with."""
    config = TrainConfig(
        "",
        "",
        T5,
        Task("", "", ""),
        optimizer="muon",
        learning_rate=0.02,
        clip_norm=1.0,
        dtype="float32",
        distillation=1.0,
        steps=STEPS,
    )
    model, optimizer, seeds = model_of(T5, dtype="float32"), make_optimizer(config), (0, 1)
    first, teacher = model.init(0), model.init(1)
    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(seeds), len(LESSONS), *x.shape)), first)
    state = jax.vmap(jax.vmap(optimizer.init))(params)
    step = make_step(config, model, model, optimizer, LESSONS)
    for number, of_seeds in enumerate(zip(*map(batches_of, seeds), strict=True)):
        batch = Batch(*map(np.stack, zip(*of_seeds, strict=True)))
        params, state = step(params, state, teacher, batch, jnp.uint32(number))

    for n, (divergence, method, alpha) in enumerate(LESSONS):
        mine = dataclasses.replace(config, divergence=divergence, method=method, alpha=alpha)
        steps = make_steps(model, mine, optimizer, make_mesh(), model)
        for s, seed in enumerate(seeds):
            alone = jax.tree.map(jnp.copy, first)
            held = optimizer.init(alone)
            for number, batch in enumerate(batches_of(seed)):
                grads, _, count = steps.gradients(alone, batch, jnp.uint32(number), teacher)
                alone, held, _ = steps.update(alone, held, grads, count)
            moved = [moves(jax.tree.map(lambda x, s=s, n=n: x[s, n], params), first), moves(alone, first)]
            # Not equal: Adam turns the rounding of a gradient near 0 into a step of another sign.
            assert alike(*moved) > 0.999, (divergence, method, seed)
            other = jax.tree.map(lambda x, s=s, n=n: x[s, n - 1], params)
            assert alike(moves(other, first), moved[1]) < 0.999, (divergence, method, seed)
