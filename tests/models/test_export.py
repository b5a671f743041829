"""Configs at their real shapes, on abstract weights: what will run on TPU, GPU and CPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from speccascade_jax import config as configs
from speccascade_jax.core.loop import generate
from speccascade_jax.core.methods import METHODS
from speccascade_jax.core.samplers import hierarchy
from speccascade_jax.core.typing import SamplingOptions
from speccascade_jax.models import model_of, presets, t5
from speccascade_jax.models.members import member


def primitives(jaxpr, path=()):
    """(name, enclosing primitives) of every equation, however deep."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, path
        for inner in jaxprs_in_params(equation.params):
            yield from primitives(inner, (*path, equation.primitive.name))


MODELS = {  # of each config: their shapes; a network's members have its shape in common
    "wmt_small_large": (t5.PRESETS["t5_1_1_small"], t5.PRESETS["t5_1_1_large"]),
    "gemma2_2b_9b": (presets.PRESETS["gemma2_2b"], presets.PRESETS["gemma2_9b"]),
    "gemma2_9b_exits": configs.load("gemma2_9b_heads").model}


@pytest.fixture(scope="module", params=MODELS)
def asked(request):
    """generate's arguments for the config, without memory for the weights."""
    run, shapes = configs.load(request.param), MODELS[request.param]
    of_one = not isinstance(shapes, tuple)
    models = [model_of(shape, dtype="bfloat16", cache_dtype="bfloat16")
              for shape in ((shapes,) if of_one else shapes)]
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
                          tuple(model.abstract_params() for model in models))
    if of_one:
        names = [path.partition("@")[2] or None for _, path in run.roles]
        models, [params] = [member(models[0], name, "it") for name in names], params
    levels = len(models) - 1
    sampler = hierarchy(models, [METHODS[run.method]] * levels, run.of_levels("block_size", levels))
    rows = 4
    arguments = (sampler, params, jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows)),
                 jax.ShapeDtypeStruct((rows, run.max_source_length), jnp.int32),
                 jax.ShapeDtypeStruct((rows,), jnp.int32),
                 SamplingOptions(jax.ShapeDtypeStruct((), jnp.float32)),
                 jax.ShapeDtypeStruct((levels,), jnp.float32))
    return arguments, {"max_new_tokens": run.max_new_tokens, "eos_id": 1}


@pytest.mark.full(quick=["wmt_small_large"])
def test_exports_for_tpu_cuda_and_cpu(asked):
    arguments, static = asked
    exported = jax.export.export(generate, platforms=["tpu", "cuda", "cpu"])(*arguments, **static)
    assert exported.platforms == ("tpu", "cuda", "cpu")
    assert exported.out_avals[0].shape == (4, static["max_new_tokens"])
    assert "callback" not in exported.mlir_module()


@pytest.mark.full(quick=["wmt_small_large"])
def test_one_decoding_loop_and_no_callback(asked):
    arguments, static = asked
    prompts = {"T5Model": 0, "DecoderModel": 2, "Member": 1}[type(arguments[0].verifier).__name__]
    found = list(primitives(generate.trace(*arguments, **static).jaxpr.jaxpr))
    assert not [name for name, _ in found if "callback" in name]
    loops = [name for name, path in found if name in ("while", "scan") and not {"while", "scan"} & {*path}]
    assert loops.count("while") == 1  # everything that repeats (the drafter's known steps) lies inside it
    assert loops.count("scan") == prompts  # read in chunks before, once a model or network
