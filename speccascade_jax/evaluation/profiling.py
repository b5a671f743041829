"""The cost of a round's parts: seconds, bytes, and share of the machine's read bandwidth."""

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import Checkpoint
from speccascade_jax.checkpoints.arrays import Placement, to_params
from speccascade_jax.core import loop
from speccascade_jax.core.methods import Method
from speccascade_jax.core.protocols import LanguageModel
from speccascade_jax.core.samplers import Speculative
from speccascade_jax.core.samplers.block import drafting
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.core.verification import TOKEN, Verification
from speccascade_jax.models import Config, model_of
from speccascade_jax.models.quantization import wants_packing
from speccascade_jax.models.stacking import stacked, wants_stacking
from speccascade_jax.planning.timing import (
    FixedLogits,
    Part,
    Timing,
    round_part,
    step_part,
    time_parts,
    timed,
)

OVERHEAD = "rules, verification, sampling"


def measure(
    drafter: LanguageModel,
    verifier: LanguageModel,
    params: tuple[Any, Any],
    method: Method,
    *,
    verification: Verification = TOKEN,
    block_size: int,
    batch_size: int,
    source_length: int,
    max_new_tokens: int,
    alpha: float,
    temperature: float,
    repetitions: int = 15,
) -> dict[str, Timing]:
    """Part -> Timing, for `batch_size` rows whose sources have `source_length` tokens. OVERHEAD is a round of
    models that compute nothing.
    """
    shape = (batch_size, source_length)
    inputs, lengths = jnp.full(shape, 2, jnp.int32), jnp.full(shape[:1], source_length, jnp.int32)
    keys = jax.vmap(jax.random.key)(jnp.arange(batch_size))
    idle_model: LanguageModel = FixedLogits(verifier.vocab_size)
    logits = jax.random.normal(jax.random.key(0), (max_new_tokens, verifier.vocab_size))
    sampler, idle = (
        Speculative(drafting(small, block_size), large, method, block_size, verification=verification)
        for small, large in ((drafter, verifier), (idle_model, idle_model))
    )
    requests = loop.requests(
        sampler, keys, inputs, lengths, SamplingOptions(temperature), [alpha], None, None, max_new_tokens
    )
    # Passed as arguments, because captured parameters would become constants of the program.
    state, nothing = (
        jax.jit(partial(loop.begin, rounds, max_new_tokens=max_new_tokens))(weights, requests)
        for rounds, weights in ((sampler, params), (idle, (logits, logits + 1e-3)))
    )
    caches = state.caches
    programs: dict[str, Part] = {}
    for name, model, weights in (("drafter", drafter, params[0]), ("verifier", verifier, params[1])):
        read = partial(model.prefill, max_length=source_length + max_new_tokens)
        programs[f"{name} prefill"] = lambda _, *source, read=read: read(*source), (weights, inputs, lengths)
    programs["drafter step"] = step_part(drafter, params[0], caches[0], 1)
    programs["verifier step"] = step_part(verifier, params[1], caches[1], 1)
    programs[scoring(block_size)] = step_part(verifier, params[1], caches[1], block_size + 1)
    programs[OVERHEAD] = round_part(idle, (logits, logits + 1e-3), nothing)
    programs["round"] = round_part(sampler, params, state)

    return time_parts(programs, repetitions, once=("drafter prefill", "verifier prefill"))


def scoring(block_size: int) -> str:
    return f"scoring {block_size + 1} tokens"


def bytes_read(model: LanguageModel, params: Any) -> int:
    """The bytes of parameters that a device reads in a decoding step, without those of an encoder and without
    tables that are only indexed."""
    inputs, lengths = jnp.ones((1, 2), jnp.int32), jnp.ones((1,), jnp.int32)
    cache = jax.eval_shape(lambda p: model.prefill(p, inputs, lengths, 4)[1], params)
    return bytes_used(lambda p, c: model.extend(p, inputs[:, :1], c)[0], params, cache)


def bytes_used(function: Callable[..., Any], params: Any, *arguments: Any) -> int:
    """The bytes of parameters, on one device, that function(params, *arguments) reads and does not only
    index."""
    jaxpr = jax.make_jaxpr(function)(params, *arguments).jaxpr
    used, leaves = computed_with(jaxpr), jax.tree.leaves(params)
    return sum(
        local_bytes(x) for x, v in zip(leaves, jaxpr.invars[: len(leaves)], strict=True) if id(v) in used
    )


def computed_with(jaxpr: Any) -> set[int]:
    """The ids of a jaxpr's variables that it computes with, apart from indexing them."""
    used = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            inner = eqn.params["jaxpr"].jaxpr
            within = computed_with(inner)
            used |= {
                id(v) for v, variable in zip(eqn.invars, inner.invars, strict=True) if id(variable) in within
            }
        elif eqn.primitive.name != "gather" and eqn.params.get("name") not in ("_take", "taken"):
            used |= {id(v) for v in eqn.invars}
    return used


def local_bytes(x: Any) -> int:
    """The bytes of an array, or of its shape, on one device."""
    shape = x.shape if getattr(x, "sharding", None) is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def read_bandwidth(megabytes: int = 512, repetitions: int = 9) -> float:
    """The bytes per second that summing a large array reads, on the accelerator or with all threads of a
    CPU."""
    size = megabytes * 2**20 // 4
    if jax.default_backend() == "cpu":
        threads = os.cpu_count() or 1
        parts = np.array_split(np.ones(size, np.float32), threads)
        with ThreadPoolExecutor(threads) as pool:
            seconds = [timed(lambda: list(pool.map(np.sum, parts))) for _ in range(repetitions)]
    else:
        total, array = jax.jit(jnp.sum), jnp.ones(size, jnp.float32)
        total(array).block_until_ready()
        seconds = [timed(lambda: total(array).block_until_ready()) for _ in range(repetitions)]
    return 4 * size / float(np.median(seconds))


def compilation(program: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, float, int]:
    """The seconds to compile a program from scratch and to load it from the persistent cache (without
    tracing), and the bytes of its arguments, results and temporaries."""
    before = jax.config.values["jax_compilation_cache_dir"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.config.update("jax_compilation_cache_dir", folder)
            compilation_cache.reset_cache()
            lowered = [jax.jit(partial(program)).lower(*arguments) for _ in range(2)]
            anew, fetched = (timed(lowered[n].compile) for n in range(2))
        finally:
            jax.config.update("jax_compilation_cache_dir", before)
            compilation_cache.reset_cache()
        memory = lowered[0].compile().memory_analysis()
    return (
        anew,
        fetched,
        sum(getattr(memory, f"{kind}_size_in_bytes") for kind in ("argument", "output", "temp")),
    )


def random_model(name: str, config: Config) -> Checkpoint:
    """A model of that shape with random float32 weights."""
    model = model_of(config)
    return Checkpoint(model, jax.jit(lambda: model.init(0))(), None, name)


def as_decoded(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """A float32 checkpoint, converted as if loaded to decode in `dtype`."""
    arrays = ((path, checkpoint.path, np.asarray(x)) for path, x in nnx.to_flat_state(checkpoint.params))
    model = checkpoints.model_for(checkpoint.model.config, dtype)
    params = to_params(model, arrays, Placement(dtype, packed=wants_packing(dtype)))
    if wants_stacking():
        model, params = stacked(model, params)
    return checkpoint._replace(model=model, params=params)


Contestant = Callable[[int, str], tuple[float, Any]]
"""(index of an input, input) -> seconds, and the result, usually an Output."""


def in_turn(
    contestants: Mapping[str, Contestant], texts: Iterable[str]
) -> dict[str, list[tuple[float, Any]]]:
    """The results of every contestant for every text. Contestants take turns to go first."""
    names = list(contestants)
    runs: dict[str, list[tuple[float, Any]]] = {name: [] for name in names}
    for index, text in enumerate(texts):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            runs[name].append(contestants[name](index, text))
    return runs


def slope(counts: Sequence[int], widths: Sequence[int], seconds: Sequence[float]) -> float:
    """The seconds per step, by least squares over inputs, without the prefill, which takes longer for a wider
    padded input."""
    design = np.stack([counts, widths, np.ones(len(counts))], axis=1)
    return float(np.linalg.lstsq(design, np.array(seconds), rcond=None)[0][0])
