"""The optimizers: which arrays Muon's matrices are, how long their updates are, and that a run resumes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from optax import contrib

from speccascade_jax.checkpoints import native
from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.models.decoder import DecoderConfig, DecoderModel
from speccascade_jax.models.t5 import T5Config, T5Model
from speccascade_jax.training.optimizer import ADAM_RMS, OPTIMIZERS, make_optimizer, orthogonal

SIZES = {"vocab_size": 24, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
MODELS = {
    "t5": T5Model(T5Config(**SIZES, num_encoder_layers=1, num_decoder_layers=1)),
    "decoder-only": DecoderModel(DecoderConfig(**SIZES, num_kv_heads=1, num_layers=2)),
}


def config(**fields):
    task = Task(train="t.tsv", validation="t.tsv", test="")
    given = {"name": "x", "output_dir": "x", "task": task, "model": T5Config(**SIZES), "steps": 9} | fields
    return TrainConfig(**given)


def gradients(params, seed):
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        tree, [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    )


def updates_of(optimizer, params, **fields):
    """{path: (parameters, their first update)}."""
    made = make_optimizer(config(optimizer=optimizer, learning_rate=1.0, warmup_steps=0, **fields))
    updates, _ = jax.jit(made.update)(gradients(params, 1), made.init(params), params)
    return {
        jax.tree_util.keystr(path): (np.asarray(x), np.asarray(y))
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(updates), strict=True
        )
    }


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


@pytest.mark.full(quick=["decoder-only"])
@pytest.mark.parametrize("family", MODELS)
def test_muon_makes_the_updates_of_layers_orthogonal(family):
    """As large as Adam's in the long run, in proportion to their array; all other arrays are AdamW's."""
    params = MODELS[family].init(0)
    by_muon, by_adam = updates_of("muon", params), updates_of("adamw", params)
    matrices = {path for path in by_muon if "layers" in path or "coder'" in path if "kernel" in path}
    assert len(matrices) >= 14
    for path, (held, update) in by_muon.items():
        if path in matrices:
            values = np.linalg.svd(update, compute_uv=False)
            assert values.max() < 2 * values.min() or min(held.shape) == max(held.shape)
            np.testing.assert_allclose(rms(update), ADAM_RMS * rms(held), rtol=0.25)
        else:
            np.testing.assert_array_equal(update, by_adam[path][1])


@pytest.mark.parametrize("shape", [(64, 64), (64, 96), (96, 64)])
def test_orthogonal_updates_are_optaxs(shape):
    """In float32 to the last digits, and in bfloat16 closely enough that a step goes the same way."""
    gradient = jax.random.normal(jax.random.key(0), shape)
    muon = contrib.scale_by_muon(weight_dimension_numbers=contrib.MuonDimensionNumbers())
    expected = muon.update(gradient, muon.init(gradient))[0]
    np.testing.assert_allclose(orthogonal(gradient, jnp.float32), expected, rtol=1e-3, atol=1e-5)
    narrow = np.asarray(orthogonal(gradient, jnp.bfloat16))
    assert np.abs(narrow - expected).max() > 1e-3  # it was rounded
    assert np.sum(narrow * expected) > 0.999 * np.linalg.norm(narrow) * np.linalg.norm(expected)


@pytest.mark.full(quick=["adamw"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_saved_state_resumes(optimizer, tmp_path):
    """Steps after a save and a load are those of an uninterrupted run, bit for bit."""
    made, params = make_optimizer(config(optimizer=optimizer, learning_rate=0.1)), MODELS["t5"].init(0)

    @jax.jit
    def step(params, state, seed):
        updates, state = made.update(gradients(params, seed), state, params)
        return jax.tree.map(jnp.add, params, updates), state

    state = made.init(params)
    for seed in range(3):
        params, state = step(params, state, seed)
    manager = native.manager(tmp_path)
    native.save(manager, 3, {"params": nnx.to_pure_dict(params), "optimizer": state})
    manager.wait_until_finished()
    saved = native.restore(manager, "optimizer", jax.eval_shape(made.init, params))
    for x, y in zip(*(jax.tree.leaves(step(params, s, 3)) for s in (state, saved)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_are_pulled_to_a_minimum(optimizer):
    """Of half the squared distance to other parameters: each optimizer comes nearer at every array."""
    params, goal = MODELS["t5"].init(0), MODELS["t5"].init(1)
    made = make_optimizer(config(optimizer=optimizer, learning_rate=0.1, steps=200, decay="linear"))

    @jax.jit
    def step(params, state):
        updates, state = made.update(jax.tree.map(jnp.subtract, params, goal), state, params)
        return jax.tree.map(jnp.add, params, updates), state

    state, first = made.init(params), params
    for _ in range(200):
        params, state = step(params, state)
    for start, end, wanted in zip(*map(jax.tree.leaves, (first, params, goal)), strict=True):
        distance = rms(np.asarray(start) - wanted)
        assert rms(np.asarray(end) - wanted) <= 0.5 * distance
