"""Configs at their real shapes, on abstract weights: what will run on TPU, GPU and CPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from speccascade_jax import config as configs
from speccascade_jax.core.loop import generate
from speccascade_jax.core.methods import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.typing import SamplingOptions
from speccascade_jax.models import gemma, model_of, t5


def primitives(jaxpr, path=()):
    """(name, enclosing primitives) of every equation, however deep."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, path
        for inner in jaxprs_in_params(equation.params):
            yield from primitives(inner, (*path, equation.primitive.name))


PAIRS = {"wmt_small_large": (t5.PRESETS["t5_1_1_small"], t5.PRESETS["t5_1_1_large"]),
         "gemma2_2b_9b": (gemma.PRESETS["gemma2_2b"], gemma.PRESETS["gemma2_9b"])}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request):
    """generate's arguments for the config, without memory for the weights."""
    run = configs.load(request.param)
    small, large = (model_of(config, dtype="bfloat16", cache_dtype="bfloat16")
                    for config in PAIRS[request.param])
    sampler = Speculative(Autoregressive(small), large, METHODS[run.method], run.block_size)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
                          (small.abstract_params(), large.abstract_params()))
    rows = 4
    arguments = (sampler, params, jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows)),
                 jax.ShapeDtypeStruct((rows, run.max_source_length), jnp.int32),
                 jax.ShapeDtypeStruct((rows,), jnp.int32),
                 SamplingOptions(jax.ShapeDtypeStruct((), jnp.float32)),
                 jax.ShapeDtypeStruct((1,), jnp.float32))
    return arguments, {"max_new_tokens": run.max_new_tokens, "eos_id": 1}


@pytest.mark.full(quick=["wmt_small_large"])
def test_exports_for_tpu_cuda_and_cpu(pair):
    arguments, static = pair
    exported = jax.export.export(generate, platforms=["tpu", "cuda", "cpu"])(*arguments, **static)
    assert exported.platforms == ("tpu", "cuda", "cpu")
    assert exported.out_avals[0].shape == (4, static["max_new_tokens"])
    assert "callback" not in exported.mlir_module()


def test_one_decoding_loop_and_no_callback(pair):
    arguments, static = pair
    found = list(primitives(generate.trace(*arguments, **static).jaxpr.jaxpr))
    assert not [name for name, _ in found if "callback" in name]
    loops = [name for name, path in found if name in ("while", "scan") and not {"while", "scan"} & {*path}]
    assert loops.count("while") == 1  # everything that repeats (the drafter's known steps) lies inside it
    prompts = isinstance(arguments[0].verifier, gemma.GemmaModel)
    assert loops.count("scan") == 2 * prompts  # each model's, read in chunks before
