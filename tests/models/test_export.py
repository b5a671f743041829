"""Configs at their real shapes, on abstract weights: what will run on TPU, GPU and CPU."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from speccascade_jax import config as configs
from speccascade_jax.checkpoints import assistant, dflash, eagle
from speccascade_jax.checkpoints.families import PRESETS
from speccascade_jax.core.loop import generate
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import hierarchy
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.models import AssistantConfig, DFlashConfig, EagleConfig, model_of, presets, t5
from speccascade_jax.models.members import member
from speccascade_jax.models.stacking import stackable
from speccascade_jax.vocabularies.joining import shapes_of
from speccascade_jax.vocabularies.translated import Resized, Tables, Translated, TranslatedParams


def primitives(jaxpr, path=()):
    """(name, enclosing primitives) of every equation, however deep."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, path
        for inner in jaxprs_in_params(equation.params):
            yield from primitives(inner, (*path, equation.primitive.name))


MODELS = {  # of each config: their shapes; a network's members have its shape in common
    "wmt_small_large": (t5.PRESETS["t5_1_1_small"], t5.PRESETS["t5_1_1_large"]),
    "gemma2_2b_9b": (presets.PRESETS["gemma2_2b"], presets.PRESETS["gemma2_9b"]),
    "gemma2_9b_exits": configs.load("gemma2_9b_heads").model,
}


@pytest.fixture(scope="module", params=MODELS)
def asked(request):
    """generate's arguments for the config, without memory for the weights."""
    run, shapes = configs.load(request.param), MODELS[request.param]
    of_one = not isinstance(shapes, tuple)
    models = [
        model_of(shape, dtype="bfloat16", cache_dtype="bfloat16")
        for shape in ((shapes,) if of_one else shapes)
    ]
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
        tuple(model.abstract_params() for model in models),
    )
    if of_one:
        names = [path.partition("@")[2] or None for _, path in run.roles]
        models, [params] = [member(models[0], name, "it") for name in names], params
    return arguments_of(run, models, params)


def numbers(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


def arguments_of(run, models, params, rows=4):
    levels = len(models) - 1
    sampler = hierarchy(models, [METHODS[run.method]] * levels, run.of_levels("block_size", levels))
    inputs = shapes_of(
        sampler.models, numbers(rows, run.max_source_length), lambda *size: numbers(rows, *size)
    )
    arguments = (
        sampler,
        params,
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows)),
        inputs,
        numbers(rows),
        SamplingOptions(numbers(dtype=jnp.float32)),
        numbers(levels, dtype=jnp.float32),
    )
    return arguments, {"max_new_tokens": run.max_new_tokens, "eos_id": 1}


PAIRS = {  # the pairs of today: a drafter's and a verifier's preset
    "qwen3_0.6b_8b": ("qwen3_0.6b", "qwen3_8b"),
    "qwen3_0.6b_14b": ("qwen3_0.6b", "qwen3_14b"),
    "llama3_1b_8b": ("llama3_1b", "llama3_8b"),
    "gemma3_270m_12b": ("gemma3_270m", "gemma3_12b"),
    "gemma3_1b_27b": ("gemma3_1b", "gemma3_27b"),
    "gemma4_e2b_assistant": ("gemma4_e2b_assistant", "gemma4_e2b"),
    "gemma4_31b_assistant": ("gemma4_31b_assistant", "gemma4_31b"),
    "llama3_8b_eagle3": ("llama3_8b_eagle3", "llama3_8b"),
    "qwen3_8b_eagle3": ("qwen3_8b_eagle3", "qwen3_8b"),
    "qwen3_8b_dflash": ("qwen3_8b_dflash", "qwen3_8b"),
    "mistral_7b_123b": ("mistral_7b", "mistral_123b"),
    "gemma2_2b_27b": ("gemma2_2b", "gemma2_27b"),
    "t5gemma_2b_9b": ("t5gemma_2b_2b", "t5gemma_9b_9b"),
    "t5gemma2_270m_4b": ("t5gemma2_270m_270m", "t5gemma2_4b_4b"),
    "qwen_0.6b_llama_8b": ("qwen3_0.6b", "llama3_8b"),
    "tinyllama_1b_mistral_7b": ("tinyllama_1b", "mistral_7b"),
}


def in_bfloat16(params):
    """The shapes in bfloat16; whole numbers stay what they are."""
    return jax.tree.map(
        lambda x: x if x.dtype == jnp.int32 else numbers(*x.shape, dtype=jnp.bfloat16), params
    )


def pair(name):
    """generate's arguments for a pair, its layers stacked as on accelerators; a drafter of another vocabulary
    has tables of half of its tokens."""
    run, shapes = configs.load(name), [PRESETS[preset] for preset in PAIRS[name]]
    attached = {AssistantConfig: assistant, EagleConfig: eagle, DFlashConfig: dflash}.get(type(shapes[0]))
    if attached is not None:
        drafter, verifier = (model_of(shape, dtype="bfloat16", cache_dtype="bfloat16") for shape in shapes)
        network = stackable(attached.joined(name, drafter, verifier))
        return arguments_of(run, network.members, in_bfloat16(network.abstract_params()))
    models = [stackable(model_of(config, dtype="bfloat16", cache_dtype="bfloat16")) for config in shapes]
    params = [in_bfloat16(model.abstract_params()) for model in models]
    drafter, size = models[0], models[-1].vocab_size
    if run.vocabulary == "auto" and shapes[0].family != shapes[1].family:
        tables = Tables(numbers(size), numbers(size, 4), numbers(size))
        width, common = shapes[0].d_model, drafter.vocab_size // 2
        head = numbers(width, common, dtype=jnp.bfloat16)
        if not shapes[0].tied_embeddings:
            flat = dict(nnx.to_flat_state(params[0]))
            flat["head", "kernel"] = flat["head", "kernel"].replace(head)
            params[0], head = nnx.from_flat_state(flat), None
        models[0] = Translated(drafter, size, 4, 1.25, None)
        params[0] = TranslatedParams(params[0], head, tables)
    elif drafter.vocab_size != size:
        models[0] = Resized(drafter, size, min(size, drafter.vocab_size))
    return arguments_of(run, models, tuple(params))


@pytest.mark.full(quick=["qwen3_0.6b_8b"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_of_today_exports(name):
    """At their full widths and depths, on TPU, CUDA and CPU; the config says what its weights take."""
    arguments, static = pair(name)
    test_exports_for_tpu_cuda_and_cpu((arguments, static))
    weights = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arguments[1])) / 1e9
    [stated] = re.findall(r"([\d.]+) GB of weights", configs.path_of(name).read_text().partition("\n")[0])
    assert float(stated) == pytest.approx(weights, abs=0.15)  # a drafter's head is cut to half of it here


@pytest.mark.full
def test_exports_for_tpu_cuda_and_cpu(asked):
    arguments, static = asked
    exported = jax.export.export(generate, platforms=["tpu", "cuda", "cpu"])(*arguments, **static)
    assert exported.platforms == ("tpu", "cuda", "cpu")
    assert exported.out_avals[0].shape == (4, static["max_new_tokens"])
    assert "callback" not in exported.mlir_module()


@pytest.mark.full
def test_one_decoding_loop_and_no_callback(asked):
    arguments, static = asked
    prompts = {"T5Model": 0, "DecoderModel": 2, "Member": 1}[type(arguments[0].verifier).__name__]
    operations = list(primitives(generate.trace(*arguments, **static).jaxpr.jaxpr))
    assert not [name for name, _ in operations if "callback" in name]
    loops = [
        name for name, path in operations if name in ("while", "scan") and not {"while", "scan"} & {*path}
    ]
    assert loops.count("while") == 1  # everything that repeats (the drafter's known steps) lies inside it
    assert loops.count("scan") == prompts  # read in chunks before, once a model or network
