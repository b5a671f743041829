"""Measures the seconds of the parts of a round.

Parts are timed in turn in one process, so that a busy machine slows all of them. Each runs in a compiled
loop, once and many times, and the result is the difference divided by the repetitions. So the fixed costs of
a call (dispatch from Python, copying caches, converting weights) are not included.

Processes that share the models time a part together: each of its rounds waits for all of them.
"""

import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from speccascade_jax.cluster import Job
from speccascade_jax.core import loop
from speccascade_jax.core.nests import roll_back
from speccascade_jax.core.protocols import NO_TOKEN, LanguageModel, Params, Prefix, Sampler
from speccascade_jax.parallel import shared_by
from speccascade_jax.scheduling.kernels import compiler_options

Part = tuple[Callable[..., Any], tuple[Any, ...]]  # function of the repetitions, other arguments
LONG_ENOUGH = 0.2  # seconds that the repetitions of a part take together, if at least 4 and at most 400 do


class Timing(NamedTuple):
    """Seconds of one execution: median and quartiles over the repetitions."""

    median: float
    low: float
    high: float


class FixedLogitsCache(NamedTuple):
    length: Int[Array, " B"]


class FixedLogits(NamedTuple):
    """A LanguageModel that computes nothing: its parameters are logits [N, V], read from the row of each
    position on. A round of such models measures the cost of a round without its models."""

    vocab_size: int

    def prefill(
        self, params: Params, inputs: Int[Array, "B S"], input_length: Int[Array, " B"], max_length: int
    ) -> tuple[Prefix, FixedLogitsCache]:
        start = jnp.zeros((inputs.shape[0], 1), jnp.int32)
        return Prefix(start, jnp.ones_like(input_length)), FixedLogitsCache(jnp.zeros_like(input_length))

    def extend(
        self, params: Params, tokens: Int[Array, "B T"], cache: FixedLogitsCache
    ) -> tuple[Float[Array, "B T V"], FixedLogitsCache]:
        rows = cache.length[:, None] + tokens[:, :1] % 2 + jnp.arange(tokens.shape[1])
        return jnp.take(params, rows, axis=0, mode="clip"), FixedLogitsCache(cache.length + tokens.shape[1])

    def roll_back(self, cache: FixedLogitsCache, length: Int[Array, " B"]) -> FixedLogitsCache:
        return FixedLogitsCache(length)


def repeated(body: Callable[[Any], Any], times: Array) -> Callable[[Any], Any]:
    """`body` applied `times` times, each time to its last result."""
    return lambda carry: lax.fori_loop(0, times, lambda _, carry: body(carry), carry)


def step_part(model: LanguageModel, params: Any, cache: Any, rows: int) -> Part:
    """extend() by `rows` tokens at the cache's length; each call reads what the last one predicted."""

    def part(times, params, tokens, cache):
        def body(carry):
            tokens, cache = carry
            logits, longer = model.extend(params, tokens, cache)
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), model.roll_back(longer, cache.length)

        return repeated(body, times)((tokens, cache))

    return part, (params, jnp.ones((cache.length.shape[0], rows), jnp.int32), cache)


def round_part(sampler: Sampler, params: Any, state: loop.State) -> Part:
    """A whole round, repeated at the same position."""

    def part(times, params, state):
        def body(now):
            later = loop.advance(sampler, params, now, eos_id=NO_TOKEN)
            rows = now.rows._replace(recent=later.rows.recent)
            return later._replace(
                emitted=now.emitted,
                rows=rows,
                caches=roll_back(sampler.models, later.caches, now.rows.start - 1),
            )

        return repeated(body, times)(state)

    return part, (params, state)


def stopwatch(part: Part, once: bool = False, job: Job | None = None) -> Callable[[], float]:
    """Compiles a part. Each call of the result measures the seconds of one execution or, with `once`, of a
    whole call. All processes of the `job` that shares the part's arrays call it at the same time."""
    (function, arguments), job = part, job or Job()
    with shared_by(arguments):  # laid out as when decoding
        lowered = jax.jit(function).lower(np.int32(0), *arguments)
        compiled = lowered.compile(compiler_options(lowered))

    def spent(often: int) -> float:
        return timed(lambda: jax.block_until_ready(compiled(np.int32(often), *arguments)))

    def seconds() -> float:
        first = spent(1)
        if once:
            return first
        # The caches are warm now. Each process of a job has measured other seconds, and a process that ran
        # more rounds than the others would wait forever.
        times = job.share(lambda: int(np.clip(LONG_ENOUGH / first, 4, 400)))
        return (spent(1 + times) - spent(1)) / times

    return seconds


def time_parts(
    programs: dict[str, Part], repetitions: int, once: Collection[str] = (), job: Job | None = None
) -> dict[str, Timing]:
    """Times each program, part -> Timing, as this process of the `job` measures it. Those named in `once` are
    timed as one call each."""
    watches = {name: stopwatch(part, name in once, job) for name, part in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for repetition in range(repetitions + 1):
        for name, watch in watches.items():
            spent = watch()
            if repetition:  # the first is a warm-up
                seconds[name].append(spent)
    return {name: Timing(*np.percentile(spent, [50, 25, 75])) for name, spent in seconds.items()}


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
