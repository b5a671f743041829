"""Models that know nothing of this package, adapted: Flax NNX, Flax Linen and a function."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import speccascade_jax as sc
from speccascade_jax.models.adapter import AdaptedModel, from_linen, from_nnx

V, ROWS, LENGTH = 11, 4, 9


class Recurrent(nnx.Module):
    """Each position sees the sum of what came before it."""

    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.embed, self.head = nnx.Embed(V, 16, rngs=rngs), nnx.Linear(16, V, rngs=rngs)

    def __call__(self, tokens):
        return 9 * self.head(jnp.tanh(jnp.cumsum(self.embed(tokens), axis=1)))


class LinenRecurrent(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        return 9 * linen.Dense(V)(jnp.tanh(jnp.cumsum(linen.Embed(V, 16)(tokens), axis=1)))


def by_function(params, tokens):
    embed, head = params
    return 9 * jnp.tanh(jnp.cumsum(embed[tokens], axis=1)) @ head


def made(kind, seed):
    """An adapted model, its parameters, and the model as its authors call it."""
    if kind == "nnx":
        module = Recurrent(seed)
        return *from_nnx(module, V), module
    if kind == "linen":
        module = LinenRecurrent()
        variables = module.init(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))
        return *from_linen(module, variables, V), lambda tokens: module.apply(variables, tokens)
    keys = jax.random.split(jax.random.key(seed))
    params = jax.random.normal(keys[0], (V, 16)), jax.random.normal(keys[1], (16, V)) / 4
    return AdaptedModel(by_function, V), params, lambda tokens: by_function(params, tokens)


def decoded(sampler, params, levels):
    inputs = jnp.arange(3 * ROWS).reshape(ROWS, 3) % V
    result = sc.generate(
        sampler,
        params,
        jax.random.split(jax.random.key(0), ROWS),
        inputs,
        jnp.array([1, 2, 3, 3]),
        sc.SamplingOptions(0.0),
        jnp.zeros(levels),
        max_new_tokens=LENGTH,
        eos_id=-1,
    )
    return inputs, result


@pytest.mark.full(quick=["linen"])
@pytest.mark.parametrize("kind", ["nnx", "linen", "function"])
def test_a_cascade_of_adapted_models_writes_what_the_model_itself_writes(kind):
    (small, drafter_params, _), (large, params, called) = made(kind, 1), made(kind, 2)
    sampler = sc.hierarchy([small, large], [sc.METHODS["speculative"]], [3])
    inputs, result = decoded(sampler, (drafter_params, params), 1)
    for row, size in enumerate([1, 2, 3, 3]):
        text = inputs[row, :size].tolist()
        for _ in range(LENGTH):
            text.append(int(jnp.argmax(called(jnp.array([text]))[0, -1])))
        assert result.tokens[row].tolist() == text[size:]
    drafted = result.counts[1].drafted
    assert int(jnp.sum(drafted)) > 0 and len(set(result.tokens.ravel().tolist())) > 3


@pytest.mark.parametrize("kind", ["nnx", "linen", "function"])
def test_what_was_rolled_back_leaves_no_trace(kind):
    model, params, called = made(kind, 3)
    tokens = jnp.array([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])
    _, cache = model.prefill(params, tokens[:, :1], jnp.array([1, 1]), 8)
    _, wrong = model.extend(params, tokens * 0, cache)
    first, later = model.extend(params, tokens[:, :2], model.roll_back(wrong, cache.length))
    rest, later = model.extend(params, tokens[:, 2:], later)
    np.testing.assert_allclose(jnp.concatenate([first, rest], axis=1), called(tokens), atol=1e-5)
    assert later.length.tolist() == [5, 5]


def test_models_of_one_shape_are_equal():
    """So one program serves them, whatever their parameters."""
    assert made("nnx", 1)[0] == made("nnx", 2)[0] and hash(made("nnx", 1)[0]) == hash(made("nnx", 2)[0])
