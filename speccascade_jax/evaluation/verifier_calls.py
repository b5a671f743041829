"""The expected number of verifier calls for texts, for any block size and verification.

Nothing is drafted: planning.runs computes the expected calls on texts that follow a rule's distribution,
however they were decoded. If two verifications are compared on the same texts, their difference has no noise
from drafting and acceptance.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from speccascade_jax.config import DecodeConfig
from speccascade_jax.core import loop
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.protocols import Sampler, ability_of, laws, states_law
from speccascade_jax.core.verification import Verification
from speccascade_jax.evaluation.quality import interval, resamples
from speccascade_jax.evaluation.sweep import DAMAGE, Track
from speccascade_jax.evaluation.turns import Cascades, Ratio, described
from speccascade_jax.inference.outputs import resume
from speccascade_jax.inference.text import Cascade, Output
from speccascade_jax.planning.runs import Runs
from speccascade_jax.scheduling.programs import with_keys
from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.scheduling.scheduler import arguments
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.tokenizer import pad

BATCH = 16


def ratios(
    sampler: Sampler, params: Any, requests: loop.Requests, tokens: Int[jax.Array, "B L"]
) -> Float[jax.Array, "B L"]:
    """q~/pi of each of `tokens` given its request (with Seeds for its key) and the tokens before it; 0 where
    pi is 0."""
    state = loop.begin(sampler, params, with_keys(requests), max_new_tokens=tokens.shape[1])
    read = jnp.concatenate([state.rows.last[:, None], tokens[:, :-1]], axis=1)
    draft_laws: Any = ability_of(sampler, "draft_laws")
    drafted, written = (
        jnp.take_along_axis(law, tokens[..., None], axis=-1)[..., 0]
        for _, law in (
            draft_laws(params, state.caches, state.rows, read),
            laws(sampler, params, state.caches, state.rows, read),
        )
    )
    return jnp.where(written > 0, drafted / jnp.where(written > 0, written, 1.0), 0.0)


def ratios_along(
    cascade: Cascade, outputs: Sequence[Output], settings: Settings
) -> tuple[Float[np.ndarray, "T L"], Int[np.ndarray, " T"]]:
    """q~/pi of the tokens of each output decoded with `settings`, and its length. Raises FieldError for a
    method whose distribution does not depend only on the prefix."""
    settings = cascade.checked(settings, {})
    [(_, lane)] = cascade.lanes([settings]).items()
    sampler = lane.plan.sampler
    rules = () if settings.scheme(cascade.levels) else settings.rules(cascade.levels)
    if ability_of(sampler, "draft_laws") is None or not states_law(sampler, rules):
        raise FieldError(
            "method", settings.name, "take a rule whose target distribution depends on the prefix alone."
        )
    rows, _ = cascade.encode([output.source for output in outputs], truncate=True)
    width = cascade.bucket(max(map(len, rows)))
    readings = cascade.foreign_readings([output.source for output in outputs])
    tokens, lengths = pad([output.tokens for output in outputs], cascade.max_new_tokens, 0)
    program, along = jax.jit(partial(ratios, sampler)), []
    for begin in range(0, len(outputs), BATCH):
        chosen = [min(n, len(outputs) - 1) for n in range(begin, begin + BATCH)]  # repeats the last one
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
        arrays = arguments(lane.plan, requests, width, cascade.tokenizer.pad_id)
        along.append(np.asarray(program(lane.params, arrays, tokens[np.array(chosen)])))
    return np.concatenate(along)[: len(outputs)], lengths


class Along(NamedTuple):
    """Texts of several seeds: [seeds, texts, ...]."""

    ratios: Float[np.ndarray, "S T L"]  # ratios_along()
    lengths: Int[np.ndarray, "S T"]
    rounds: Float[np.ndarray, "S T"]  # verifier calls counted in these decodings

    @property
    def tokens(self) -> Int[np.ndarray, " T"]:
        return self.lengths.sum(axis=0)

    @property
    def counted(self) -> Float[np.ndarray, " T"]:
        return self.rounds.sum(axis=0)

    def calls(self, way: Verification, block_size: int) -> Float[np.ndarray, " T"]:
        """Expected verifier calls for each input, summed over all seeds."""
        each = zip(self.ratios, self.lengths, strict=True)
        return np.sum([expected_calls(*texts, way, block_size) for texts in each], axis=0)


def measure_texts(run: DecodeConfig, texts: Sequence[str], path: Path, *, seeds: int, track: Track) -> Along:
    """The outputs of `run` for `texts` with each of `seeds` seeds, read from `path` if it exists.

    Raises ValueError if `path` has other texts, or a damaged line.
    """
    cascades = Cascades(texts)

    def read(_: int, line: Any) -> tuple[Float[np.ndarray, "T L"], Int[np.ndarray, " T"], list[int]]:
        try:
            return *pad_ratios(line["ratios"], run.max_new_tokens, len(texts)), line["rounds"]
        except DAMAGE:
            raise ValueError("no ratios of these texts") from None

    settings = {"run": run.record("missing", "examples", "task"), **described(texts)}
    known, file = resume(path, settings, read)
    with file:
        for seed in track(range(len(known), seeds), "texts"):
            decoder = dataclasses.replace(run, seed=run.seed + seed)
            _, outputs = cascades.decoder(decoder)(0, texts)
            along, lengths = ratios_along(cascades.of(decoder), outputs, decoder.settings)
            line = {
                "ratios": [row[:length].tolist() for row, length in zip(along, lengths, strict=True)],
                "rounds": [output.counts["rounds"] for output in outputs],
            }
            file.add(line)
            known.append(read(0, line))
    return Along(*map(np.array, zip(*known[:seeds], strict=True)))


def pad_ratios(
    rows: Sequence[Sequence[float]], width: int, count: int
) -> tuple[Float[np.ndarray, "T L"], Int[np.ndarray, " T"]]:
    """Rows of ratios, padded to at least `width`, and their lengths. Raises ValueError unless there are
    `count` rows of valid ratios."""
    if len(rows) != count:
        raise ValueError(f"{len(rows)} rows, not {count}")
    lengths = np.array([len(row) for row in rows])
    padded = np.ones((count, max(width, *lengths)))
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    if not (padded >= 0).all():
        raise ValueError("a ratio is negative, or no number")
    return padded, lengths


def expected_calls(
    along: Float[np.ndarray, "T L"], lengths: Int[np.ndarray, " T"], way: Verification, block_size: int
) -> Float[np.ndarray, " T"]:
    """The expected verifier calls for each text, from its ratios_along()."""
    return Runs.of(along, lengths, way, block_size).calls(np.ones(block_size + 1))


def fewer(calls: Float[np.ndarray, " T"], baseline: Float[np.ndarray, " T"]) -> Ratio:
    """The calls of `baseline` divided by `calls` for the same texts, which is the ratio of tokens per
    call."""
    drawn = resamples(len(calls))
    ratio = baseline[drawn].sum(axis=1) / calls[drawn].sum(axis=1)
    return Ratio(float(baseline.sum() / calls.sum()), *interval(ratio.tolist()))
