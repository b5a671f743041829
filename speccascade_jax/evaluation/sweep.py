"""Quality against cost: sweeps over methods and their lenience, and what a person picks from them.

A sweep's folder holds quality.jsonl, a line for each operating point, and latency.jsonl, a line for
each timed example; both go on where a killed run left them.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax.config import DecodeConfig, load
from speccascade_jax.core.baselines import BASELINES
from speccascade_jax.core.metrics import check_counts, position_acceptance, relative_cost
from speccascade_jax.core.rules import METHODS
from speccascade_jax.evaluation.quality import bootstrap, interval, resamples, score, statistics
from speccascade_jax.inference.outputs import resume_lines
from speccascade_jax.inference.text import Cascade, Output

MODELS = ("verifier", "drafter")
COMPARED = ("token_v3", "opt", "diff", "chow", "lossy", "bild_star", "speculative", "token_cascade",
            "sequence")  # what a sweep compares unless told otherwise
THRESHOLDS = {"bild_star": 10.0, "bild": 10.0, "bild_compat": 10.0}  # alpha = 1 of a sweep stands for this
UNTIMED = ("oracle",)  # its time means nothing
References = Sequence[Sequence[str]]
Track = Callable[[Sequence[Any], str], Iterator[Any]]


@dataclasses.dataclass(frozen=True)
class Point:
    """How a pair may decode: one point of a trade-off curve. gamma 0: the method has none."""

    method: str
    alpha: float
    gamma: int
    temperature: float
    top_p: float | None = None

    def options(self) -> dict[str, Any]:
        """Cascade.generate's arguments."""
        return {"method": self.method, "alpha": self.alpha, "block_size": max(self.gamma, 1),
                "temperature": self.temperature, "top_p": self.top_p}

    def alone(self, model: str) -> "Point":
        """One model decoding as this point does."""
        return Point(model, 0.0, 0, self.temperature, self.top_p)

    def __str__(self) -> str:
        return f"{self.method} alpha {self.alpha:g}" + (f" gamma {self.gamma}" if self.gamma else "")


def grid(methods: Sequence[str], alphas: Sequence[float], gammas: Sequence[int],
         temperatures: Sequence[float], top_ps: Sequence[float | None] = (None,)) -> list[Point]:
    """Every operating point once, the two models alone first at each temperature and top-p.

    alphas in [0, 1] are stretched to a method's thresholds (THRESHOLDS) and kept within its range.
    Greedy methods appear at temperature 0 alone.
    """
    points: dict[Point, None] = {}
    for temperature, top_p in itertools.product(temperatures, top_ps):
        for model in MODELS:
            points[Point(model, 0.0, 0, temperature, top_p)] = None
        for method in methods:
            if method in BASELINES and BASELINES[method].greedy and temperature != 0:
                continue
            known = METHODS.get(method) or BASELINES.get(method)
            if known is None:
                if method not in MODELS:
                    raise ValueError(f"unknown method {method!r}; known: "
                                     f"{', '.join([*METHODS, *BASELINES])}.")
                continue
            for gamma in gammas if method in METHODS else (0,):
                for alpha in (0.0,) if method == "speculative" else alphas:
                    value = min(max(alpha * THRESHOLDS.get(method, 1.0), known.low), known.high)
                    points[Point(method, round(value, 6), gamma, temperature, top_p)] = None
    return list(points)


class OneShape(Cascade):
    """A Cascade that pads all inputs to one length: one program a method and gamma."""

    def bucket(self, length: int) -> int:
        return self.max_source_length


@dataclasses.dataclass(frozen=True)
class Quality:
    """A point decoded over a split."""

    statistics: np.ndarray        # [N, K], see evaluation.statistics
    counts: dict[str, int]        # summed over the examples
    acceptance: float             # accepted / tested drafted positions
    tokens: int

    def rate(self, above: str, below: str) -> float | None:
        return self.counts[above] / self.counts[below] if self.counts.get(below) else None


def measure_quality(cascade: Cascade, points: Sequence[Point], sources: Sequence[str], references: References,
                    metric: str, path: Path, settings: dict[str, Any], *, shared: dict[str, Any],
                    batch_size: int, track: Track) -> dict[Point, Quality]:
    """Every point's quality over `sources`, from `path` where it stands there already.

    shared: what all points have in common of Cascade.generate's arguments (seed, top_k).
    The counters' identities are asserted for every decoding.
    """
    lines, file = resume_lines(path, settings)
    known = {Point(**line.pop("point")): line for line in lines}
    with file:
        for point in track([p for p in points if p not in known], "quality"):
            outputs = list(cascade.generate(sources, batch_size=batch_size, truncate=True, **shared,
                                            **point.options()))
            known[point] = _line(outputs, references, metric)
            file.write(json.dumps({"point": dataclasses.asdict(point), **known[point]}) + "\n")
            file.flush()
    return {p: Quality(**{**known[p], "statistics": np.array(known[p]["statistics"])}) for p in points}


def _line(outputs: Sequence[Output], references: References, metric: str) -> dict[str, Any]:
    rows = [output.counts for output in outputs]
    check_counts(rows, [len(output.tokens) for output in outputs])
    names = {name for row in rows for name in row if name != "histogram"}
    return {"statistics": np.round(statistics(metric, [o.text for o in outputs], references), 6).tolist(),
            "counts": {name: sum(row.get(name, 0) for row in rows) for name in sorted(names)},
            "acceptance": position_acceptance([o.origin for o in outputs]),
            "tokens": sum(len(o.tokens) for o in outputs)}


@dataclasses.dataclass(frozen=True)
class Latency:
    """A point timed at batch 1: seconds and tokens of each example, over all trials."""

    seconds: np.ndarray  # [N]
    tokens: np.ndarray   # [N]


def measure_latency(cascade: Cascade, points: Sequence[Point], sources: Sequence[str], path: Path,
                    settings: dict[str, Any], *, shared: dict[str, Any], trials: int, track: Track
                    ) -> dict[Point, Latency]:
    """The paper's protocol (SPEC section 7): batch 1, every point on each example in random order, so that
    drift hits all alike, `trials` times. Programs are compiled before, and timed apart (cascade.clock)."""
    points = [point for point in points if point.method not in UNTIMED]
    settings = {**settings, "points": [dataclasses.asdict(point) for point in points]}
    lines, file = resume_lines(path, settings)
    done = {(line["trial"], line["example"]) for line in lines}
    rows, _ = cascade.encode(sources, truncate=True)

    def decode(point: Point, n: int) -> tuple[float, Output]:
        before = cascade.clock.decode_seconds
        output = next(iter(cascade.generate([sources[n]], first_index=n, truncate=True, **shared,
                                            **point.options())))
        return cascade.clock.decode_seconds - before, output

    with file:
        work = [(t, n) for t in range(trials) for n in range(len(sources)) if (t, n) not in done]
        if work:
            programs = {(p.method, p.gamma, p.top_p is None): p for p in points}
            shapes = {cascade.bucket(len(row)): n for n, row in enumerate(rows)}
            for point, n in track(list(itertools.product(programs.values(), shapes.values())), "compiling"):
                decode(point, n)
        for trial, n in track(work, "latency"):
            seconds, tokens = [0.0] * len(points), [0] * len(points)
            # In a new order each time: a program is slower after another one than after itself.
            for k in np.random.default_rng([trial, n]).permutation(len(points)):
                seconds[k], output = decode(points[k], n)
                tokens[k] = len(output.tokens)
            lines.append({"trial": trial, "example": n, "seconds": seconds, "tokens": tokens})
            file.write(json.dumps(lines[-1]) + "\n")
            file.flush()
    totals = np.zeros((2, len(points), len(sources)))
    for line in lines:
        totals[:, :, line["example"]] += [line["seconds"], line["tokens"]]
    return {point: Latency(*totals[:, k]) for k, point in enumerate(points)}


@dataclasses.dataclass(frozen=True)
class Result:
    """An operating point beside the verifier alone. Intervals are 95%, paired over examples."""

    point: Point
    quality: float
    gain: tuple[float, float]                    # of quality over the verifier
    deferral_rate: float | None
    rejection_rate: float | None
    calls_per_token: float
    latency: float | None = None                 # relative to the verifier
    latency_interval: tuple[float, float] | None = None
    predicted: float | None = None               # the latency by SPEC section 6


def results(metric: str, qualities: dict[Point, Quality], latencies: dict[Point, Latency]) -> list[Result]:
    """Every point of a sweep with its quality, its measured latency and the predicted one."""
    found = []
    for point, q in qualities.items():
        verifier = qualities[point.alone("verifier")]
        calls = {"verifier": q.tokens, "drafter": 0}.get(point.method, q.counts.get("rounds", 0))
        timed: dict[str, Any] = {}
        if point in latencies:
            own, alone, small = (latencies[p] for p in (point, *map(point.alone, MODELS)))
            drawn = resamples(len(own.seconds))
            ratios = own.seconds[drawn].sum(axis=1) / alone.seconds[drawn].sum(axis=1)
            step_ratio = _seconds_a_token(small) / _seconds_a_token(alone)
            timed = {"latency": float(own.seconds.sum() / alone.seconds.sum()),
                     "latency_interval": interval(ratios),
                     "predicted": cost_a_token(point, q, step_ratio)
                     * float(own.tokens.sum() / alone.tokens.sum())}
        accepted = q.rate("accepted", "drafted")
        defers = point.method not in METHODS or METHODS[point.method].defers
        found.append(Result(
            point, score(metric, q.statistics.sum(axis=0)),
            bootstrap(metric, q.statistics, verifier.statistics),
            q.rate("deferred", "drafted") if defers else None,
            None if accepted is None else 1 - accepted, calls / max(q.tokens, 1), **timed))
    return found


def _seconds_a_token(latency: Latency) -> float:
    return float(latency.seconds.sum() / latency.tokens.sum())


def cost_a_token(point: Point, quality: Quality, step_ratio: float) -> float:
    """Predicted time per token in verifier steps (SPEC section 6). Methods without a fixed gamma: what
    their counted passes cost; reading several tokens counts as one step."""
    if point.method in METHODS:
        return relative_cost(quality.acceptance, point.gamma, step_ratio)
    if point.method in MODELS:
        return {"verifier": 1.0, "drafter": step_ratio}[point.method]
    counts = quality.counts
    return (counts["drafter_passes"] * step_ratio + counts["rounds"]) / counts["emitted"]


def fastest(found: Sequence[Result], at_least: float) -> Result | None:
    """The fastest timed point whose quality is at least `at_least`."""
    return min((r for r in found if r.latency is not None and r.quality >= at_least),
               key=lambda r: (r.latency, -r.quality), default=None)


def best(found: Sequence[Result], at_most: float) -> Result | None:
    """The best point whose relative latency is at most `at_most`."""
    return max((r for r in found if r.latency is not None and r.latency <= at_most),
               key=lambda r: (r.quality, -(r.latency or 0.0)), default=None)


def table_two(found: Sequence[Result]) -> dict[tuple[float, float | None], dict[str, tuple[Any, Any]]]:
    """The paper's Table 2 for each (temperature, top_p): method -> (the fastest point at no less than the
    verifier's quality, the best one within its latency), None where there is no such point."""
    tables: dict[tuple[float, float | None], dict[str, tuple[Any, Any]]] = {}
    for r in found:
        if r.point.method not in MODELS and r.latency is not None:
            key = r.point.temperature, r.point.top_p
            if r.point.method not in tables.setdefault(key, {}):
                group = [other for other in found if other.point.method == r.point.method
                         and (other.point.temperature, other.point.top_p) == key]
                verifier = next(v for v in found if v.point == r.point.alone("verifier"))
                tables[key][r.point.method] = fastest(group, verifier.quality), best(group, 1.0)
    return tables


def config_text(config: str, run: DecodeConfig, promise: str) -> str:
    """A config file that decode.py runs: `config` with the point of `run` and what else `run` has changed."""
    loaded, point = load(config), ("method", "alpha", "block_size", "temperature", "top_p")
    changed = [f"{field.name}={getattr(run, field.name)!r}" for field in dataclasses.fields(run)
               if field.name in point or getattr(run, field.name) != getattr(loaded, field.name)]
    return (f'"""Picked by scripts/tradeoff.py from {config}: {promise}."""\n\n'
            "import dataclasses\n\nfrom speccascade_jax.config import load\n\n"
            f"config = dataclasses.replace(\n    load({config!r}),\n    " + ",\n    ".join(changed) + ")\n")
