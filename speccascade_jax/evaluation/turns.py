"""Compares decoders on the same texts: their counts and their times.

A decoder is a DecodeConfig: models, dtype and settings. Both measurements are JSON lines files, which killed
runs resume, and are reduced to ratios of sums with 95% intervals over the texts.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from speccascade_jax.config import DecodeConfig
from speccascade_jax.evaluation.quality import interval, resamples
from speccascade_jax.evaluation.rates import check_counts
from speccascade_jax.evaluation.sweep import DAMAGE, OneShape, Track
from speccascade_jax.inference.outputs import resume
from speccascade_jax.inference.text import Cascade, Output
from speccascade_jax.settings import Settings

SETTINGS = tuple(field.name for field in dataclasses.fields(Settings))
BESIDES = ("batch_size", "prefix_cache_bytes", "truncate", "task", "missing", "examples", "planned_for")
"""Fields of a config that change neither its models nor their outputs."""
WARM = 2  # groups that every decoder decodes before timing begins

Decode = Callable[[int, Sequence[str]], tuple[float, list[Output]]]
"""(index of the first text, texts) -> seconds, outputs."""


class Counts(NamedTuple):
    """Sums over seeds."""

    tokens: Float[np.ndarray, " N"]  # of each text
    rounds: Float[np.ndarray, " N"]  # verifier calls
    drafted: Float[np.ndarray, " N"]
    accepted: Float[np.ndarray, " N"]


class Times(NamedTuple):
    """The times of each group of texts decoded together."""

    seconds: Float[np.ndarray, " N"]  # median of all trials
    tokens: Float[np.ndarray, " N"]
    rounds: Float[np.ndarray, " N"]  # verifier calls
    drafted: Float[np.ndarray, " N"]
    accepted: Float[np.ndarray, " N"]


class Ratio(NamedTuple):
    """A ratio of sums over texts and its 95% interval."""

    value: float
    low: float
    high: float

    def __format__(self, digits: str) -> str:
        return "{:{}} ({:{}} to {:{}})".format(*(part for end in self for part in (end, digits or ".2f")))


class Cascades:
    """The models of decoders, each loaded once, for inputs padded to the longest of `texts`.

    Equal parameters are the same arrays. Otherwise a decoder whose models no other one has would find them in
    the processor's caches less often, and might take longer.
    """

    def __init__(self, texts: Sequence[str]):
        self.texts, self.loaded = texts, list[tuple[dict[str, Any], Cascade]]()
        self.arrays = dict[Any, jax.Array]()

    def of(self, run: DecodeConfig) -> Cascade:
        models = run.record(*SETTINGS, *BESIDES)
        models["max_new_tokens"] = run.max_new_tokens
        for known, cascade in self.loaded:
            if known == models:
                return cascade
        whole = OneShape.from_config(run)
        longest = max(map(len, whole.encode(self.texts, truncate=True)[0]))
        shared = {id(params): jax.tree.map(self._shared, params) for params in whole.params}
        padded = dataclasses.replace(
            whole,
            params=tuple(shared[id(params)] for params in whole.params),
            max_source_length=Cascade.bucket(whole, longest),
        )
        self.loaded.append((models, padded))
        return padded

    def _shared(self, array: jax.Array) -> jax.Array:
        """An equal array that has been loaded before, or this one."""
        digest = hashlib.sha256(np.asarray(array).tobytes()).digest()
        return self.arrays.setdefault((array.shape, array.dtype, digest), array)

    def decoder(self, run: DecodeConfig) -> Decode:
        """A decoder with the settings of `run`, for run.batch_size texts at a time."""
        return partial(self._decode, run)

    def _decode(self, run: DecodeConfig, first: int, texts: Sequence[str]) -> tuple[float, list[Output]]:
        cascade = self.of(run)
        before = cascade.clock.decode_seconds
        outputs = list(
            cascade.generate(texts, run.settings, batch_size=run.batch_size, first_index=first, truncate=True)
        )
        return cascade.clock.decode_seconds - before, outputs


def described(texts: Sequence[str]) -> dict[str, Any]:
    """A digest that identifies these texts in the settings of a file."""
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return {"texts": len(texts), "sha256": digest}


def measure_counts(
    decoders: Mapping[str, DecodeConfig],
    texts: Sequence[str],
    path: Path,
    *,
    seeds: int,
    track: Track,
    cascades: Cascades | None = None,
) -> dict[str, Counts]:
    """The counts of every decoder over `texts` with each of `seeds` seeds, read from `path` if it exists.

    Raises ValueError if `path` has the counts of other texts, or a damaged line.
    """
    known: list[tuple[Any, Float[np.ndarray, "K N"]]] = []

    def read(_: int, line: Any) -> None:
        try:
            known.append((line["decoder"], _whole(line["counts"], len(Counts._fields), len(texts))))
        except DAMAGE:
            raise ValueError("no counts of these texts") from None

    _, file = resume(path, described(texts), read)
    cascades = cascades or Cascades(texts)
    work = [
        (name, dataclasses.replace(run, seed=run.seed + n))
        for name, run in decoders.items()
        for n in range(seeds)
    ]
    sums = {name: np.zeros((len(Counts._fields), len(texts))) for name in decoders}
    with file:
        for name, run in track(work, "counts"):
            key = run.record(*BESIDES)
            counted = next((counts for decoder, counts in known if decoder == _as_json(key)), None)
            if counted is None:
                _, outputs = cascades.decoder(run)(0, texts)
                counted = _counts(outputs)
                file.add({"decoder": key, "counts": counted.tolist()})
            sums[name] += counted
    return {name: Counts(*rows) for name, rows in sums.items()}


def measure_times(
    decoders: Mapping[str, Decode],
    texts: Sequence[str],
    path: Path,
    settings: dict[str, Any],
    *,
    group: int,
    trials: int,
    track: Track,
) -> dict[str, Times]:
    """The times of every decoder for each `group` of texts, `trials` times, read from `path` if it exists.

    All decoders decode a group in turn, in a random order, so that a slower machine affects all of them.
    Compilation and first runs are not counted. settings: a description of the decoders, which is stored next
    to `path`. Raises ValueError if `path` has the times of other decoders, or a damaged line.
    """
    names = list(decoders)
    groups = [range(n, min(n + group, len(texts))) for n in range(0, len(texts), group)]
    seconds = np.full((trials, len(names), len(groups)), np.nan)
    counted = np.zeros((len(Counts._fields), len(names), len(groups)))

    def read(_: int, line: Any) -> None:
        try:
            if not np.isnan(seconds[line["trial"], :, line["group"]]).all():
                raise ValueError("twice")
            seconds[line["trial"], :, line["group"]] = _whole(line["seconds"], len(names))
            counted[:, :, line["group"]] = _whole(line["counts"], len(counted), len(names))
        except DAMAGE:
            raise ValueError("no times of these decoders") from None

    kept = {**settings, **described(texts), "decoders": names, "group": group, "trials": trials}
    _, file = resume(path, kept, read)
    work = [(t, g) for t in range(trials) for g in range(len(groups)) if np.isnan(seconds[t, 0, g])]
    with file:
        for name, g in track(
            list(itertools.product(names, range(len(groups))[:WARM] if work else ())), "compiling"
        ):
            decoders[name](groups[g].start, [texts[n] for n in groups[g]])
        for trial, g in track(work, "times"):
            # In a new order each time, because a program is slower after another one than after itself.
            for k in np.random.default_rng([trial, g]).permutation(len(names)):
                spent, outputs = decoders[names[k]](groups[g].start, [texts[n] for n in groups[g]])
                seconds[trial, k, g] = spent
                counted[:, k, g] = _counts(outputs).sum(axis=1)
            line = {"seconds": seconds[trial, :, g].tolist(), "counts": counted[:, :, g].tolist()}
            file.add({"trial": trial, "group": g, **line})
    middle = np.median(seconds, axis=0)
    return {name: Times(middle[k], *counted[:, k]) for k, name in enumerate(names)}


def tokens_a_call(decoder: Counts | Times, other: Counts | None = None) -> Ratio:
    """Tokens per verifier call or, with `other`, their ratio to those of `other`, paired over texts."""
    return _ratio(
        [decoder.tokens, *([other.rounds] if other else [])],
        [decoder.rounds, *([other.tokens] if other else [])],
    )


def times_as_fast(decoder: Times, other: Times) -> Ratio:
    """Tokens per second relative to `other`, paired over groups of texts."""
    return _ratio([decoder.tokens, other.seconds], [decoder.seconds, other.tokens])


def _ratio(above: Sequence[np.ndarray], below: Sequence[np.ndarray]) -> Ratio:
    """The product of the sums of `above` divided by the product of the sums of `below`."""

    def of(chosen: Any) -> np.ndarray:
        up, down = (
            np.prod([values[chosen].sum(axis=-1) for values in several], axis=0) for several in (above, below)
        )
        return up / down

    everything = np.arange(len(above[0]))
    low, high = interval(of(resamples(len(everything))).tolist())
    return Ratio(float(of(everything)), low, high)


def _counts(outputs: Sequence[Output]) -> Float[np.ndarray, "K N"]:
    """A row for each field of Counts."""
    rows = [output.counts for output in outputs]
    check_counts(rows, [len(output.tokens) for output in outputs])
    kept = [[row.get(name, 0) for row in rows] for name in Counts._fields[1:]]
    return np.array([[len(output.tokens) for output in outputs], *kept], np.float64)


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _whole(values: Any, *shape: int) -> np.ndarray:
    numbers = np.array(values, np.float64).reshape(shape)
    if not np.isfinite(numbers).all():
        raise ValueError("no numbers")
    return numbers
