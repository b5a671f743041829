"""How many calls of the verifier texts are expected to take, for any block size and way to verify.

Nothing is drafted: planning.runs finds the expected calls along texts that follow a rule's law, whatever way
they were decoded. Where both ways of verifying are compared on the same texts, the chance of drafts and of
their acceptance adds nothing to the differences.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from speccascade_jax.core import loop
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.samplers import Speculative
from speccascade_jax.core.verification import Verification
from speccascade_jax.evaluation.quality import interval, resamples
from speccascade_jax.inference.scoring import laws, states_law
from speccascade_jax.inference.text import Cascade, Output
from speccascade_jax.planning.runs import Runs
from speccascade_jax.scheduling.scheduler import Request, arguments
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.tokenizer import pad

BATCH = 16


def ratios(
    sampler: Speculative, params: Any, requests: loop.Requests, tokens: Int[jax.Array, "B L"]
) -> Float[jax.Array, "B L"]:
    """q~/pi of each of `tokens` after its request and the tokens before it, 0 where pi is."""
    state = loop.begin(sampler, params, requests, max_new_tokens=tokens.shape[1])
    read = jnp.concatenate([state.rows.last[:, None], tokens[:, :-1]], axis=1)
    below = (params, state.caches) if sampler.shares else (params[0], state.caches[0])
    drafted, written = (
        jnp.take_along_axis(law, tokens[..., None], axis=-1)[..., 0]
        for _, law in (
            laws(sampler.drafter, *below, state.rows, read),
            laws(sampler, params, state.caches, state.rows, read),
        )
    )
    return jnp.where(written > 0, drafted / jnp.where(written > 0, written, 1.0), 0.0)


def ratios_along(
    cascade: Cascade, outputs: Sequence[Output], settings: Settings
) -> tuple[Float[np.ndarray, "T L"], Int[np.ndarray, " T"]]:
    """q~/pi of the tokens of each output, which `settings` has decoded, and its length. Raises FieldError for
    a method that states no law of its tokens by their prefix."""
    settings = cascade.checked(settings, {})
    [(_, lane)] = cascade.lanes([settings]).items()
    sampler = lane.plan.sampler
    if not isinstance(sampler, Speculative) or not states_law(sampler, settings.rules(cascade.levels)):
        raise FieldError(
            "method", settings.name, "take a rule whose target distribution depends on the prefix alone."
        )
    rows, _ = cascade.encode([output.source for output in outputs], truncate=True)
    width = cascade.bucket(max(map(len, rows)))
    readings = cascade.foreign_readings([output.source for output in outputs])
    tokens, lengths = pad([output.tokens for output in outputs], cascade.max_new_tokens, 0)
    program, found = jax.jit(partial(ratios, sampler)), []
    for begin in range(0, len(outputs), BATCH):
        chosen = [min(n, len(outputs) - 1) for n in range(begin, begin + BATCH)]  # the last one again
        requests = [
            Request(
                rows[n],
                settings,
                outputs[n].index,
                lane.numbers(settings),
                settings.stop,
                readings[n],
                cascade.spans(settings),
            )
            for n in chosen
        ]
        asked = arguments(lane.plan, requests, width, cascade.tokenizer.pad_id)
        found.append(np.asarray(program(lane.params, asked, tokens[np.array(chosen)])))
    return np.concatenate(found)[: len(outputs)], lengths


def expected_calls(
    along: Float[np.ndarray, "T L"], lengths: Int[np.ndarray, " T"], way: Verification, block_size: int
) -> Float[np.ndarray, " T"]:
    """Of the verifier in each text, from its ratios_along()."""
    return Runs.of(along, lengths, way, block_size).calls(np.ones(block_size + 1))


def fewer(calls: Float[np.ndarray, " T"], baseline: Float[np.ndarray, " T"]) -> tuple[float, float, float]:
    """How many times as many calls `baseline` takes for the same texts (so many times as many tokens a call
    `calls` yields), and the 95% interval over texts."""
    drawn = resamples(len(calls))
    ratio = baseline[drawn].sum(axis=1) / calls[drawn].sum(axis=1)
    return float(baseline.sum() / calls.sum()), *interval(ratio.tolist())
