"""Layers stacked and read in a loop, as accelerators have them, against the same layers one by one."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from shapes import DECODERS, GEMMA4S, LENGTH, SOURCE, TARGET, TINY_GEMMA, TINY_T5, TINY_T5GEMMA, TINY_T5GEMMA2

from speccascade_jax.checkpoints.arrays import Placement, to_params
from speccascade_jax.core.nests import insert
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models import BlockDrafterConfig, ExitsConfig, SharedEncoderConfig, model_of, stacking
from speccascade_jax.models.stacking import stacked

TABLES = dataclasses.replace(TINY_T5, shared_position_bias=False)
NARROW = dataclasses.replace(TINY_T5, d_model=32, num_heads=2, num_encoder_layers=0, num_decoder_layers=1)
SHAPES = {
    "t5": TINY_T5,
    "t5, a table a layer": TABLES,
    "exits": ExitsConfig(TINY_T5, (1,), "norm"),
    "shared encoder": SharedEncoderConfig(TINY_T5, NARROW, states=True),
    "block drafter": BlockDrafterConfig(
        dataclasses.replace(TINY_T5, relative_max_distance=16), (0, 2), 5, 2, num_heads=2, d_kv=16, d_ff=24
    ),
    "a decoder's exits": ExitsConfig(TINY_GEMMA, (1,), "norm"),
    "t5gemma": TINY_T5GEMMA,
    "t5gemma2": TINY_T5GEMMA2,
    **DECODERS,
    **GEMMA4S,
}


def both(name, packed=None):
    """The model and its parameters, and the same stacked."""
    model = model_of(SHAPES[name], **({"dtype": packed} if packed else {}))
    params = jax.jit(lambda: model.init(0))()
    if packed:
        arrays = ((path, str(path), np.asarray(x)) for path, x in nnx.to_flat_state(params))
        params = to_params(model, arrays, Placement(packed, packed=True))
    return (model, params), stacked(model, params)


@partial(jax.jit, static_argnums=(0, 1))
def read(model, number, params, tokens, cache):
    """extend(), by a member of a network."""
    extend = getattr(model, "extend_member", lambda _, *given: model.extend(*given))
    return extend(number, params, tokens, cache)


def decoded(model, params, rows):
    """Logits of three calls, the second after a roll back, of every member of a network."""
    prefill, outputs = jax.jit(model.prefill, static_argnums=3), []
    _, cache = prefill(params, SOURCE[:rows], LENGTH[:rows], 24)
    for number in range(len(getattr(model, "names", " "))):
        for tokens, covered in (
            (TARGET[:rows, :5], None),
            (TARGET[:rows, 5:6], np.arange(rows) + 1),
            (TARGET[:rows, 1:6], None),
        ):  # two reach the caches in turn
            cache = cache if covered is None else model.roll_back(cache, covered)
            logits, cache = read(model, number, params, tokens, cache)
            outputs.append(logits)
        cache = model.roll_back(cache, np.zeros(rows, np.int32))
    return outputs


@pytest.mark.full(quick=["t5, a table a layer-3"])
@pytest.mark.parametrize(
    "name,rows",
    [
        ("t5, a table a layer", 3),
        ("shared encoder", 1),
        ("block drafter", 3),
        ("a decoder's exits", 3),
        ("t5gemma", 1),
        ("t5gemma2", 3),
        ("gemma3_text", 3),
        ("gemma4, unlike groups", 3),
    ],
)
def test_logits_are_those_of_layers_one_by_one(name, rows):
    atol = 5e-5 if name in GEMMA4S else 1e-5  # Gemma 4 does not scale scores: it rounds more
    one_by_one, at_once = (decoded(*given, rows) for given in both(name))
    for wanted, logits in zip(one_by_one, at_once, strict=True):
        np.testing.assert_allclose(logits, wanted, atol=atol)


@partial(jax.jit, static_argnums=(0, 2))
def states_of(model, params, before):
    """The states [N, 3, 10, D] of TARGET in blocks of 3, 1 and 6 tokens."""
    network, blocks = model.merged(params), []
    cache = network.start(3, 16, jnp.float32)
    for part in TARGET[:, :3], TARGET[:, 3:4], TARGET[:, 4:10]:
        _, states, cache = network.advance_with_states(part, cache, before)
        blocks.append(states)
    return jnp.concatenate(blocks, axis=2)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_states_before_layers_are_what_the_layers_below_have_written(name):
    """In the order asked for, by whatever blocks; stacked or not."""
    (model, params), (loop, stack) = both(name)
    network, depth = model.merged(params), model.config.num_layers
    expected = [network.embed(TARGET[:, :10])]
    for number in range(1, depth + 1):
        x, _ = network.advance(TARGET[:, :10], network.start(3, 16, jnp.float32), number)
        expected.append(x)
    for before in ((depth, 0, depth - 1), (1,)):
        for given in (model, params), (loop, stack):
            states = states_of(*given, before)
            for state, number in zip(states, before, strict=True):
                np.testing.assert_allclose(state, expected[number], atol=1e-5)
    assert np.abs(np.diff(expected, axis=0)).max(axis=(1, 2, 3)).min() > 0.1


@pytest.mark.full
def test_packed_kernels_are_stacked_too():
    one_by_one, at_once = (decoded(*given, 3) for given in both("t5", "int8"))
    for wanted, logits in zip(one_by_one, at_once, strict=True):
        np.testing.assert_allclose(logits, wanted, atol=1e-5)


@pytest.mark.full
def test_rows_go_on_in_other_places():
    """insert() of a stacked cache: the row that came in reads on as it would have."""
    model, params = stacked(model := model_of(TINY_T5), model.init(0))

    @jax.jit
    def read_on(params):
        caches = []
        for rows in [0, 1], [2]:
            cache = model.prefill(params, SOURCE[rows], LENGTH[rows], 24)[1]
            caches.append(model.extend(params, TARGET[rows, :3], cache)[1])
        caches.insert(0, insert(model, *caches, np.array([1]), False))
        return [
            model.extend(params, TARGET[rows, 3:5], cache)[0]
            for rows, cache in zip(([0, 2], [0, 1], [2]), caches, strict=True)
        ]

    mixture, first, second = read_on(params)  # mixed, before, and the row that came in
    np.testing.assert_allclose(mixture[0], first[0], atol=1e-5)
    np.testing.assert_allclose(mixture[1], second[0], atol=1e-5)


@pytest.mark.full
def test_a_cascade_on_an_accelerator_writes_the_same_texts(t5_pair, monkeypatch):
    texts, outputs = ["where is the station?", "a train", "good morning"], []
    for accelerator in (False, True):
        monkeypatch.setattr(stacking, "wants_stacking", lambda accelerator=accelerator: accelerator)
        cascade = Cascade.load(t5_pair / "drafter", t5_pair / "verifier", max_new_tokens=12)
        assert cascade.verifier.stacked == accelerator
        outputs.append(
            [
                result.tokens
                for result in cascade.generate(
                    texts, method="token_v3", alpha=0.3, temperature=1.0, batch_size=2
                )
            ]
        )
    assert outputs[0] == outputs[1]
