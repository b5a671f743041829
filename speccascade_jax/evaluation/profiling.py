"""What the parts of a round cost: seconds, bytes, share of the machine's read bandwidth.

Parts are timed in turn, in one process, so that a busy machine slows them alike. Each is repeated inside
a compiled loop, once and many times, and the difference counts: what a call costs beside its rounds (entering
from Python, copying caches in, converting weights) is no part of one.
"""

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.compilation_cache import compilation_cache

from speccascade_jax.core import decoding
from speccascade_jax.core.decoding import NO_TOKEN, Autoregressive, Speculative
from speccascade_jax.core.rules import Method
from speccascade_jax.core.typing import LanguageModel, Prefix, SamplingOptions

Array = jax.Array
Part = tuple[Callable[..., Any], tuple[Any, ...]]  # a function of how often, and its other arguments
OVERHEAD = "rules, verification, sampling"
LONG_ENOUGH = 0.2  # seconds that the repetitions of a part take, or four of them more


class Timing(NamedTuple):
    """Seconds of one execution: median and quartiles over the repetitions."""

    median: float
    low: float
    high: float


class GivenCache(NamedTuple):
    length: Array  # [B]


class Given(NamedTuple):
    """A LanguageModel that computes nothing: its parameters are logits [N, V], read from the row of
    each position on. A round of such models is what a round costs beside its models."""

    vocab_size: int

    def prefill(self, params, inputs, input_length, max_length):
        start = jnp.zeros((inputs.shape[0], 1), jnp.int32)
        return Prefix(start, jnp.ones_like(input_length)), GivenCache(jnp.zeros_like(input_length))

    def extend(self, params, tokens, cache):
        rows = cache.length[:, None] + tokens[:, :1] % 2 + jnp.arange(tokens.shape[1])
        return jnp.take(params, rows, axis=0, mode="clip"), GivenCache(cache.length + tokens.shape[1])


def repeated(body: Callable[[Any], Any], times: Array) -> Callable[[Any], Any]:
    """`body` applied so many times, each to what the last one gave."""
    return lambda carry: lax.fori_loop(0, times, lambda _, carry: body(carry), carry)


def step_part(model: LanguageModel, params: Any, cache: Any, rows: int) -> Part:
    """extend() by `rows` tokens at the cache's length: each feeds what the last predicted."""
    def part(times, params, tokens, cache):
        def body(carry):
            tokens, cache = carry
            logits, longer = model.extend(params, tokens, cache)
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), longer._replace(length=cache.length)
        return repeated(body, times)((tokens, cache))

    return part, (params, jnp.ones((cache.length.shape[0], rows), jnp.int32), cache)


def round_part(sampler: Speculative, params: Any, state: decoding.State, options: SamplingOptions,
               alpha: float) -> Part:
    """A whole round, again and again at one position."""
    def part(times, params, state, options, alphas):
        def body(now):
            later = decoding.advance(sampler, params, now, options, alphas, eos_id=NO_TOKEN)
            rows = now.rows._replace(last=later.rows.last)
            return later._replace(emitted=now.emitted, rows=rows,
                                  caches=sampler.roll_back(later.caches, now.rows.start - 1))
        return repeated(body, times)(state)

    return part, (params, state, options, jnp.full((sampler.level,), alpha, jnp.float32))


def measure(drafter: LanguageModel, verifier: LanguageModel, params: tuple[Any, Any], method: Method, *,
            block_size: int, batch_size: int, source_length: int, max_new_tokens: int, alpha: float,
            options: SamplingOptions, repetitions: int = 15) -> dict[str, Timing]:
    """Part -> Timing, for `batch_size` rows whose sources fill `source_length` tokens.

    OVERHEAD is a round of models that compute nothing.
    """
    shape = (batch_size, source_length)
    inputs, lengths = jnp.full(shape, 2, jnp.int32), jnp.full(shape[:1], source_length, jnp.int32)
    keys = jax.vmap(jax.random.key)(jnp.arange(batch_size))
    options = SamplingOptions(jnp.float32(options.temperature), options.top_p, options.top_k)
    start = partial(decoding.begin, keys=keys, inputs=inputs, input_length=lengths,
                    max_new_tokens=max_new_tokens)
    given: LanguageModel = Given(verifier.vocab_size)
    logits = jax.random.normal(jax.random.key(0), (max_new_tokens, verifier.vocab_size))
    sampler, idle = (Speculative(Autoregressive(small), large, method, block_size)
                     for small, large in ((drafter, verifier), (given, given)))
    # A list of arguments, not a closure: captured parameters would become constants of the program.
    state = jax.jit(partial(start, sampler))(params)
    caches = state.caches
    programs: dict[str, Part] = {}
    for name, model, own in (("drafter", drafter, params[0]), ("verifier", verifier, params[1])):
        read = partial(model.prefill, max_length=source_length + max_new_tokens)
        programs[f"{name} prefill"] = lambda _, *given, read=read: read(*given), (own, inputs, lengths)
    programs["drafter step"] = step_part(drafter, params[0], caches[0], 1)
    programs["verifier step"] = step_part(verifier, params[1], caches[1], 1)
    programs[scoring(block_size)] = step_part(verifier, params[1], caches[1], block_size + 1)
    idle_params = logits, logits + 1e-3
    programs[OVERHEAD] = round_part(idle, idle_params, start(idle, idle_params), options, alpha)
    programs["round"] = round_part(sampler, params, state, options, alpha)

    compiled = {name: jax.jit(part).lower(np.int32(0), *arguments).compile()
                for name, (part, arguments) in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for repetition in range(repetitions + 1):
        for name, (_, arguments) in programs.items():
            def spent(often: int, call=compiled[name], arguments=arguments) -> float:
                return timed(lambda: jax.block_until_ready(call(np.int32(often), *arguments)))

            own = spent(1)
            if not name.endswith("prefill"):  # the call above left the others' weights behind: all are warm
                times = int(np.clip(LONG_ENOUGH / own, 4, 40))
                own = (spent(1 + times) - spent(1)) / times
            if repetition:  # the first warms up
                seconds[name].append(own)
    return {name: Timing(*np.percentile(spent, [50, 25, 75])) for name, spent in seconds.items()}


def scoring(block_size: int) -> str:
    return f"scoring {block_size + 1} tokens"


def bytes_read(model: LanguageModel, params: Any) -> int:
    """Bytes of the parameters that a decoding step reads: not an encoder's, nor a table it only indexes."""
    inputs, lengths = jnp.ones((1, 2), jnp.int32), jnp.ones((1,), jnp.int32)
    cache = jax.eval_shape(lambda p: model.prefill(p, inputs, lengths, 4)[1], params)
    jaxpr = jax.make_jaxpr(lambda p, c: model.extend(p, inputs[:, :1], c)[0])(params, cache).jaxpr
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars
            if eqn.primitive.name != "gather" and eqn.params.get("name") != "_take"}
    leaves = jax.tree.leaves(params)
    return sum(x.nbytes for x, v in zip(leaves, jaxpr.invars[:len(leaves)], strict=True) if id(v) in used)


def read_bandwidth(megabytes: int = 512, repetitions: int = 9) -> float:
    """Bytes a second that summing a large array reads: with all threads of a CPU, or on the accelerator."""
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


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compilation(program: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, float, int]:
    """Seconds to compile a program anew, and to fetch it from the persistent cache (tracing apart); bytes
    of its arguments, results and temporaries."""
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
    return anew, fetched, sum(getattr(memory, f"{kind}_size_in_bytes") for kind in
                              ("argument", "output", "temp"))
