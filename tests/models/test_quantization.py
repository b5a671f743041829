"""Packed kernels: what int8 rounds, and that models that decode with them keep the protocol's laws."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from shapes import LENGTH, SOURCE, TARGET, TINY_GEMMA, TINY_T5, TINY_T5_1_0, TINY_T5GEMMA2
from tiny_models import in_blocks, prefill, prefilled

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import Checkpoint
from speccascade_jax.evaluation import profiling as parts
from speccascade_jax.models import model_of, quantization
from speccascade_jax.models.quantization import PackedKernel, pack, packed_matmul

CONFIGS = {"t5_1_1": TINY_T5, "t5_1_0": TINY_T5_1_0, "gemma": TINY_GEMMA, "t5gemma2": TINY_T5GEMMA2}


def rounded(x):
    """int8 values and scales of a matrix's rows, in float64."""
    step = np.maximum(np.abs(x).max(axis=-1, keepdims=True), 1e-30) / 127
    return np.rint(x / step), step


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [(1,), (2, 3), (40,)])
def test_int8_multiplies_what_was_rounded(rows, transposed):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(*rows, 64)).astype(np.float32), rng.normal(size=(64, 48)).astype(np.float32)
    x[..., -1, :] *= 1e4  # each row has a scale of its own
    kernel[:, 3] *= 1e-3
    kernel[:, 5] = 0
    packed = pack(kernel, "int8", transposed)
    values, scale = rounded(kernel.T.astype(np.float64))
    np.testing.assert_array_equal(packed.values, values if transposed else values.T)
    whole, step = rounded(x.astype(np.float64))
    product = jax.jit(packed_matmul)(jnp.asarray(x), packed)
    np.testing.assert_allclose(product, whole @ values.T * step * scale[:, 0], rtol=1e-5)
    assert np.all(np.abs(product - x @ kernel) < 0.2 * np.abs(x).max(axis=-1, keepdims=True))
    np.testing.assert_array_equal(packed_matmul(jnp.zeros((2, 64)), packed), 0)


def test_bfloat16_is_the_product_of_bfloat16():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(3, 64)).astype(np.float32), rng.normal(size=(64, 48)).astype(np.float32)
    half = [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in (x, kernel)]
    for transposed in (False, True):
        product = packed_matmul(jnp.asarray(x), pack(kernel, jnp.bfloat16, transposed))
        np.testing.assert_allclose(product, half[0] @ half[1], atol=1e-4)


def decoded(model, params, folder, dtype):
    """The model as it is loaded to decode in `dtype`."""
    checkpoints.save(folder, Checkpoint(model, params, None, "memory"), "native")
    return checkpoints.load(folder, dtype, packed=True)


@pytest.mark.full
@pytest.mark.parametrize(
    "name,dtype,transposed_from",
    [
        *((name, "int8", (1, 1024)[n % 2]) for n, name in enumerate(CONFIGS)),
        *((name, "bfloat16", 1) for name in CONFIGS),
    ],
)
def test_packed_models_are_float32_rounded_and_keep_the_laws(
    name, dtype, transposed_from, tmp_path, monkeypatch
):
    """append, chunk, rollback, rows; one row at a time too, which takes a path of its own."""
    monkeypatch.setattr(quantization, "TRANSPOSED_FROM", transposed_from)
    model = model_of(CONFIGS[name])
    params = model.init(0)
    loaded = decoded(model, params, tmp_path / "saved", dtype)
    kernels = [
        x
        for x in jax.tree.leaves(loaded.params, is_leaf=lambda x: isinstance(x, PackedKernel))
        if isinstance(x, PackedKernel)
    ]
    assert all(x.values.dtype == dtype for x in kernels)
    assert sum(x.values.size for x in kernels) > 0.5 * sum(x.size for x in jax.tree.leaves(params))
    expected, _ = in_blocks(model, params, TARGET, [30], prefilled(model, params))
    start = prefilled(loaded.model, loaded.params)
    blocks = partial(in_blocks, loaded.model, loaded.params)
    spread = np.std(expected)
    whole, cache = blocks(TARGET, [30], start)
    half = 0.015 if name == "t5gemma2" else 0.01  # its encoder and decoder have norms of heads, too
    assert np.std(whole - expected) < (0.05 if dtype == "int8" else half) * spread
    close = partial(np.testing.assert_allclose, atol=0.15 * spread)  # what another rounding may change
    close(blocks(TARGET, [1, 11, 18], start)[0], whole)
    kept = jnp.array([3, 20, 11])
    again, _ = blocks(TARGET[:, 20:], [6, 4], cache._replace(length=start.length + 20))
    close(again, whole[:, 20:])
    back, _ = blocks(TARGET[:, :1], [1], cache._replace(length=start.length + kept))
    for row in range(3):
        _, row_cache = prefill(loaded.model, loaded.params, SOURCE[row : row + 1], LENGTH[row : row + 1], 64)
        close(blocks(TARGET[row : row + 1], [1] * 30, row_cache)[0][0], whole[row])
        tokens = np.append(TARGET[row : row + 1, : kept[row]], TARGET[row : row + 1, :1], axis=1)
        close(blocks(tokens, [tokens.shape[1]], row_cache)[0][0, -1], back[row, 0])


@pytest.mark.full
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA's CPU backend")
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("name", ["t5_1_1", "gemma"])
def test_a_loop_of_steps_copies_neither_caches_nor_kernels(name, rows, tmp_path, monkeypatch):
    """XLA may do both silently, and makes a step half as slow again."""
    monkeypatch.setattr(quantization, "TRANSPOSED_FROM", 1)
    model = model_of(CONFIGS[name])
    loaded = decoded(model, model.init(0), tmp_path / "saved", "bfloat16")
    _, cache = prefill(loaded.model, loaded.params, SOURCE[:1], LENGTH[:1], 64)
    part, arguments = parts.step_part(loaded.model, loaded.params, cache, rows)
    body = jax.jit(part).lower(np.int32(4), *arguments).compile().as_text()
    kernels = {",".join(map(str, x.shape)) for x in jax.tree.leaves(loaded.params) if x.ndim == 2}
    buffers = {",".join(map(str, (*batch, *cache.keys[0].shape[-3:]))) for batch in ((), (1,))}
    assert not copied(body) & (kernels | buffers)

    @jax.jit
    def planted(count, keys):  # each step keeps what it writes over
        return jax.lax.fori_loop(0, count, lambda n, both: (both[0].at[0].add(1), both[0]), (keys, keys + 1))

    assert copied(planted.lower(np.int32(4), cache.keys[0]).compile().as_text()) & buffers


def copied(program):
    """The shapes of what a program copies outside its entry."""
    return set(re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", program.split("\nENTRY")[0]))


def test_a_loop_widens_no_table():
    """XLA on some CPUs (of Intel's with AMX) takes a bfloat16 table's rows as float32: it must not do so with
    the whole table before a loop, which then carries it."""
    table, first = jnp.zeros((768, 96), jnp.bfloat16), jnp.zeros((2,), jnp.int32)

    def widened(rows_of):
        @jax.jit
        def program(table, index):
            def step(n, carry):
                table, index = carry
                return table, jnp.argmax(rows_of(table, index) + n, axis=-1).astype(jnp.int32)

            return jax.lax.fori_loop(0, 5, step, (table, index))[1]

        carried = re.findall(r"while\(.*|-> .*", program.lower(table, first).compile().as_text())
        assert carried
        return [line for line in carried if "f32[768,96]" in line]

    assert not widened(quantization.table_rows)
    table = table.astype(jnp.float32)
    assert widened(lambda table, index: table[index])  # the control: one that is carried in float32


@pytest.mark.full
@pytest.mark.parametrize("to", checkpoints.FORMATS)
@pytest.mark.parametrize("name", ["t5_1_1", "t5_1_0"])
def test_every_format_is_packed_alike(to, name, tmp_path):
    """Kernels in int8, the tied embedding among them; what is no kernel in bfloat16."""
    model = model_of(CONFIGS[name])
    params = model.init(0)
    checkpoints.save(tmp_path / to, Checkpoint(model, params, None, "memory"), to)
    state = dict(nnx.to_flat_state(checkpoints.load(tmp_path / to, "int8").params))
    for path, variable in nnx.to_flat_state(params):
        array, value = np.asarray(variable[...]), state[path].get_value()
        if path[-1] == "kernel" or (path == ("embedding",) and model.config.tied_embeddings):
            expected = pack(array, "int8") if path[-1] == "kernel" else pack(array.T, "int8", True)
            jax.tree.map(np.testing.assert_array_equal, value, expected)
        else:
            np.testing.assert_array_equal(value, array.astype(jnp.bfloat16))
