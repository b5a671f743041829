"""A drafter that begins as a slice of its verifier."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from speccascade_jax.models import SharedEncoderConfig
from speccascade_jax.models.shared_encoder import SharedEncoderModel
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.training.slices import with_slice

VERIFIER = T5Config(
    vocab_size=48, d_model=16, d_kv=4, d_ff=24, num_heads=3, num_encoder_layers=1, num_decoder_layers=3
)
SHAPES = {
    "1.1": VERIFIER,
    "1.0": dataclasses.replace(VERIFIER, gated=False, tied_embeddings=True),
    "biases by layer": dataclasses.replace(VERIFIER, shared_position_bias=False),
}


def network_of(verifier, seed=0, change=lambda network: None, **drafter):
    """A network whose norms have unequal scales, and whose drafter is a slice."""
    shape = dataclasses.replace(verifier, **{"num_encoder_layers": 0, **drafter})
    model = SharedEncoderModel(SharedEncoderConfig(verifier, shape, states=True))
    network, rng = model.merged(model.init(seed)), np.random.default_rng(seed)
    for path, value in nnx.to_flat_state(nnx.state(network)):
        if path[0] == "verifier" and path[-1] == "scale":
            value[...] = rng.uniform(0.5, 2, value.shape)
    change(network)
    return model.merged(with_slice(model, nnx.state(network)))


def alike(a, b):
    """The cosine of two arrays."""
    a, b = np.ravel(a), np.ravel(b)
    return a @ b / np.sqrt((a @ a) * (b @ b))


@pytest.mark.parametrize("verifier", SHAPES.values(), ids=SHAPES)
def test_a_slice_of_full_size_is_the_verifier_in_other_coordinates(verifier):
    """Logits, and what each part of a layer writes except for its scale."""
    network = network_of(verifier, num_decoder_layers=2)
    drafter, full = network.drafter, network.verifier
    kept = network.states.kernel[...] * full.decoder_norm.scale[...][:, None]  # [D, D]
    np.testing.assert_allclose(kept.T @ kept, np.eye(16), atol=1e-5)
    rng = np.random.default_rng(1)
    x, encoded = (jnp.asarray(rng.standard_normal((2, size, 16)), jnp.float32) for size in (5, 7))
    if not verifier.tied_embeddings:
        np.testing.assert_allclose(drafter.logits(x @ kept), full.logits(x), atol=1e-4)
    states = full.decoder_norm(x)
    assert alike(network.states(states), full.decoder_norm(x) / full.decoder_norm.scale[...] @ kept) > 0.9999
    assert alike(drafter.embedding[...], full.embedding[...] @ kept) > 0.9999
    biases = full.decoder_bias[...]
    np.testing.assert_array_equal(
        drafter.decoder_bias[...], biases if verifier.shared_position_bias else biases[1:]
    )
    bias = jnp.zeros((1, 1, 1, 1))
    for layer, whole in zip(drafter.decoder, list(full.decoder)[1:], strict=True):
        for part, norm in (("attention", "attention_norm"), ("cross", "cross_norm")):
            here, there = getattr(layer, part), getattr(whole, part)
            h, g = getattr(layer, norm)(x @ kept), getattr(whole, norm)(x)
            memory = (network.projection(encoded), encoded) if part == "cross" else (h, g)
            written = here(h, *here.keys_values(memory[0]), bias)
            assert alike(written, there(g, *there.keys_values(memory[1]), bias) @ kept) > 0.9999
        written = layer.mlp(layer.mlp_norm(x @ kept), lambda x: x)
        assert alike(written, whole.mlp(whole.mlp_norm(x), lambda x: x) @ kept) > 0.9999


def test_heads_and_neurons_that_write_nothing_are_left_out():
    """What they read makes no difference to the drafter."""

    def silent(by):
        def change(network):
            layer = network.verifier.decoder[-1]
            for part in (layer.attention, layer.cross):
                part.out.kernel[...] = part.out.kernel[...].at[4:8].set(0)  # the second of three heads
                part.query.kernel[...] = part.query.kernel[...].at[:, 4:8].multiply(by)
            layer.mlp.down.kernel[...] = layer.mlp.down.kernel[...].at[3:9].set(0)
            layer.mlp.gate.kernel[...] = layer.mlp.gate.kernel[...].at[:, 3:9].multiply(by)

        return change

    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 18, "num_decoder_layers": 1}
    one, other = (
        dict(nnx.to_flat_state(nnx.state(network_of(VERIFIER, change=silent(by), **sizes).drafter)))
        for by in (1.0, 5.0)
    )
    for path, value in one.items():
        np.testing.assert_array_equal(value[...], other[path][...])


def test_the_directions_are_those_that_the_head_reads():
    """A head that reads few directions keeps its logits in a slice of as many."""

    def narrow(network):
        kernel = np.array(network.verifier.head.kernel[...])
        kernel[:, 8:] = kernel[:, :8] @ np.random.default_rng(2).standard_normal((8, 40))
        network.verifier.head.kernel[...] = kernel

    network = network_of(VERIFIER, change=narrow, d_model=8, num_heads=2, d_ff=8, num_decoder_layers=1)
    states = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 16)), jnp.float32)
    drafted = network.drafter.head(network.states(states))
    np.testing.assert_allclose(drafted, network.verifier.head(states), atol=1e-3)


def test_no_value_is_read_on_the_host():
    """A process of several has only its part of split parameters."""
    model = SharedEncoderModel(
        SharedEncoderConfig(VERIFIER, dataclasses.replace(VERIFIER, num_encoder_layers=0))
    )
    params = model.init(0)
    shapes = jax.eval_shape(partial(with_slice, model), params)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)


def test_a_scale_of_zero_divides_nothing():
    def silent(network):
        scale = network.verifier.decoder_norm.scale
        scale[...] = scale[...].at[3].set(0)

    network = network_of(VERIFIER, change=silent, num_decoder_layers=1)
    for _, value in nnx.to_flat_state(nnx.state(network)):
        assert np.isfinite(value[...]).all()


@pytest.mark.parametrize(
    "change",
    [
        {"d_model": 24},
        {"num_decoder_layers": 4},
        {"d_kv": 8},
        {"gated": False},
        {"relative_max_distance": 64},
    ],
)
def test_a_drafter_whose_shape_is_no_slice_begins_anew(change):
    shape = dataclasses.replace(VERIFIER, num_encoder_layers=0, **change)
    model = SharedEncoderModel(SharedEncoderConfig(VERIFIER, shape))
    params = model.init(0)
    assert with_slice(model, params) is params
