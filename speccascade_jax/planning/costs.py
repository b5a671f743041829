"""The times of each model's calls on this machine, or on the machines that share the models."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from speccascade_jax.cluster import Job
from speccascade_jax.core import loop
from speccascade_jax.core.protocols import Block, Cache, LanguageModel, Origin, Params, Rows, Sampler
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.samplers.block import Parallel
from speccascade_jax.inference.text import Cascade
from speccascade_jax.parallel import shared_by, whole_on
from speccascade_jax.planning.readings import options_of
from speccascade_jax.planning.timing import FixedLogits, Part, round_part, stopwatch, time_parts
from speccascade_jax.settings import Settings
from speccascade_jax.vocabularies.joining import inputs_of
from speccascade_jax.vocabularies.translated import Translated

Array = jax.Array
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # tokens of the timed calls; other widths are interpolated
Track = Callable[[Iterable[Any], str], Iterable[Any]]


@dataclasses.dataclass(frozen=True)
class Written:
    """A drafter that takes no time: it drafts the same `width` tokens in every round. The rounds of its level
    cost only the verifier's call, verification and sampling."""

    model: LanguageModel
    width: int
    level: int = dataclasses.field(default=0, init=False)
    overhang: int = dataclasses.field(default=0, init=False)

    @property
    def models(self) -> LanguageModel:
        return self.model

    def plain(self, counts: Any) -> dict[str, Any]:
        return {"model_passes": int(counts)}

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Any]:
        columns = jnp.full((len(rows.start), self.width), Origin.MODEL, jnp.int32)
        laws = jnp.broadcast_to(params, (*columns.shape, params.shape[-1]))
        size = jnp.minimum(rows.room, self.width)
        return Block(columns, laws, laws, columns, size), caches, size


def call_seconds(
    cascade: Cascade,
    widths: Sequence[int],
    settings: Settings,
    *,
    source_length: int,
    repetitions: int = 9,
    track: Track = lambda work, name: work,
    job: Job | None = None,
) -> tuple[Float[np.ndarray, "M N"], Float[np.ndarray, "M M"]]:
    """The seconds of each model's calls that read n = 0 .. max(widths) tokens [M, N + 1], and
    Candidates.besides.

    Column 0 is 0. Calls of `widths` tokens are timed at batch 1, one model after the other. Whole rounds are
    timed for neighbouring models and for each model with the largest; other pairs are assumed to cost what
    model i costs with its neighbour. If a drafter writes a draft in one call, all tokens that the call reads
    except the first are masks. Processes of a `job` that share the models each measure these themselves, at
    the same time.
    """
    calls: list[Float[np.ndarray, " N"]] = []
    every, width, last = np.arange(max(widths) + 1), min(5, max(widths)), len(cascade.models) - 1
    besides = np.zeros((last + 1, last + 1))
    for i in track(range(last + 1), "timing calls"):
        model, params = cascade.models[i], cascade.params[i]
        samplers = {str(width): (_sampler(model, width), _params(model, params, width)) for width in widths}
        below = range(i) if i == last else range(max(i - 1, 0), i)
        for j in below if width > 1 else []:
            pair = dataclasses.replace(
                cascade, models=(cascade.models[j], model), params=(cascade.params[j], params)
            )
            samplers[f"with {j}"] = pair.sampler(
                dataclasses.replace(settings, method="speculative", alpha=0.0, block_size=width - 1)
            )
        timings = time_parts(
            {name: _part(cascade, *sampler, settings, source_length) for name, sampler in samplers.items()},
            repetitions,
            job=job,
        )
        # On a busy machine, a difference of two times may be negative.
        known = [max(timings[str(width)].median, 1e-7) for width in widths]
        calls.append(np.where(every > 0, np.interp(every, widths, known), 0))
        extra = [
            timings[f"with {j}"].median
            - calls[i][width]
            - (calls[j][width] if at_once(cascade.models[j]) else (width - 1) * calls[j][1])
            for j in below
            if width > 1
        ]
        besides[:i, i] = np.maximum(extra if len(extra) == i else extra[-1:] or 0.0, 0)
    return np.array(calls), besides


def step_watch(
    cascade: Cascade, settings: Settings, source_length: int, job: Job | None = None
) -> Callable[[], float]:
    """A function that measures the seconds of the largest model's one-token call again, as in
    call_seconds()."""
    sampler = _sampler(cascade.models[-1], 1)
    return stopwatch(_part(cascade, sampler, cascade.params[-1], settings, source_length), job=job)


def at_once(model: LanguageModel) -> bool:
    """Whether the model writes a whole draft in one call."""
    return getattr(model, "drafts_at_once", None) is not None


def _sampler(model: LanguageModel, width: int) -> Sampler:
    """A sampler with one call of `model` per round, which reads `width` tokens."""
    if at_once(model):
        return Parallel(model, width)
    if width == 1:
        return Autoregressive(model)
    return Speculative(
        Written(FixedLogits(model.vocab_size), width), model, METHODS["speculative"], width - 1
    )


def _params(model: LanguageModel, params: Any, width: int) -> Any:
    if width == 1 or at_once(model):
        return params
    return jnp.full(model.vocab_size, 1 / model.vocab_size), params


def _part(cascade: Cascade, sampler: Sampler, params: Any, settings: Settings, source_length: int) -> Part:
    inputs, lengths = np.full((1, source_length), 2, np.int32), np.full(1, source_length, np.int32)
    translated = [model for model in jax.tree.leaves(sampler.models) if isinstance(model, Translated)]
    if translated:
        inputs = inputs_of(
            sampler.models, inputs, [{model: [2] * model.reads(source_length) for model in translated}]
        )
    requests = loop.requests(
        sampler,
        jax.random.key(0)[None],
        inputs,
        lengths,
        options_of(settings),
        np.zeros(sampler.level),
        None,
        None,
        cascade.max_new_tokens,
    )
    params, requests = whole_on(cascade.mesh, (params, requests))
    begin = jax.jit(partial(loop.begin, sampler, max_new_tokens=cascade.max_new_tokens))
    with shared_by(params):
        state = begin(params, requests)
    return round_part(sampler, params, state)
