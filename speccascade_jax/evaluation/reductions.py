"""Computes figures from a sweep's measurements: quality and latency relative to the verifier alone, with
intervals, and the best points."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from speccascade_jax.core.samplers.named import SINGLE_MODEL
from speccascade_jax.evaluation.quality import bootstrap, interval, resamples, score
from speccascade_jax.evaluation.rates import relative_cost
from speccascade_jax.evaluation.sweep import Contest, Latency, Quality, alone, block_size_of, contests
from speccascade_jax.settings import Settings


class Time(NamedTuple):
    """A point's latency relative to the verifier alone."""

    share: float
    interval: tuple[float, float]
    predicted: float  # by cost_a_token()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A point compared to the verifier alone. Intervals are 95%, paired over examples."""

    point: Settings
    quality: float
    gain: tuple[float, float]  # difference in quality from the verifier
    gain_over_drafter: tuple[float, float]  # difference from the drafter alone
    deferral_rate: float | None
    rejection_rate: float | None
    calls_per_token: float
    time: Time | None = None  # None if not timed
    contest: Contest | None = None  # None: the curve of its method
    verifier_quality: float | None = None  # for a lossless point: that of its verifier

    @property
    def name(self) -> str:
        """The name of its curve."""
        return self.contest.name if self.contest else self.point.name

    @property
    def is_verifier(self) -> bool:
        """Whether its curve is that of the verifier alone, without an additional truncation."""
        return is_largest(self.name)

    @property
    def expected(self) -> float:
        """The expected quality. Lossless outputs have the verifier's distribution and so its quality: two
        samples of the same distribution differ only by noise."""
        return self.quality if self.verifier_quality is None else self.verifier_quality

    @property
    def lenience(self) -> Any:
        return self.contest.lenience if self.contest else self.point.alpha

    @property
    def panel(self) -> Settings:
        """The settings of the verifier alone that it is compared with. The drafter has the same
        truncation."""
        return self.contest.panel if self.contest else alone(self.point, "verifier")


def compare(
    metric: str, qualities: dict[Settings, Quality], latencies: dict[Settings, Latency]
) -> list[Comparison]:
    """Every point of a sweep with its quality, and its measured and predicted latency."""
    comparisons = []
    stands = [(point, q, contest) for point, q in qualities.items() for contest in contests(point, qualities)]
    for point, q, contest in stands:
        verifier, drafter = (qualities[alone(contest.panel, model)] for model in SINGLE_MODEL)
        alike = alone(point, "verifier")
        calls = q.counts.get("rounds", 0)
        if point.name in SINGLE_MODEL:
            calls = q.tokens if is_largest(point.name) else 0
        time = None
        if point in latencies:
            latency, large, small = (
                latencies[p] for p in (point, *(alone(contest.panel, m) for m in SINGLE_MODEL))
            )
            drawn = resamples(len(latency.seconds))
            ratios = latency.seconds[drawn].sum(axis=1) / large.seconds[drawn].sum(axis=1)
            step_ratio = _seconds_a_token(small) / _seconds_a_token(large)
            time = Time(
                float(latency.seconds.sum() / large.seconds.sum()),
                interval(ratios),
                cost_a_token(point, q, step_ratio) * float(latency.tokens.sum() / large.tokens.sum()),
            )
        accepted = q.rate("accepted", "drafted")
        comparisons.append(
            Comparison(
                point,
                _quality(metric, q),
                bootstrap(metric, q.statistics, verifier.statistics),
                bootstrap(metric, q.statistics, drafter.statistics),
                q.rate("deferred", "drafted") if point.defers else None,
                None if accepted is None else 1 - accepted,
                calls / max(q.tokens, 1),
                time,
                contest,
                _quality(metric, qualities[alike]) if point.lossless and alike in qualities else None,
            )
        )
    return comparisons


def is_largest(name: str) -> bool:
    """Whether a method's name means the largest model alone."""
    return name in SINGLE_MODEL and SINGLE_MODEL[name].model == -1


def _quality(metric: str, quality: Quality) -> float:
    return score(metric, quality.statistics.sum(axis=0))


def _seconds_a_token(latency: Latency) -> float:
    return float(latency.seconds.sum() / latency.tokens.sum())


def cost_a_token(point: Settings, quality: Quality, step_ratio: float) -> float:
    """The predicted time per token, in verifier steps. step_ratio: drafter step / verifier step.

    With a block size, it is rates.relative_cost. Otherwise it is the cost of the counted passes, where
    reading several tokens counts as one step.
    """
    if "passes of model 1" in quality.counts:
        return math.nan  # a hierarchy, for which planning predicts costs
    if block_size_of(point) and not point.adaptive:
        return relative_cost(quality.acceptance, block_size_of(point), step_ratio)
    if point.name in SINGLE_MODEL:
        return 1.0 if is_largest(point.name) else step_ratio
    counts = quality.counts
    if not counts.keys() >= {"drafter_passes", "rounds", "emitted"}:
        return math.nan  # a custom sampler: the cost of its passes is unknown
    return (counts["drafter_passes"] * step_ratio + counts["rounds"]) / max(counts["emitted"], 1)


def fastest(comparisons: Sequence[Comparison], at_least: float) -> Comparison | None:
    """The fastest timed point whose expected quality is at least `at_least`."""
    return min(
        (r for r in comparisons if r.time is not None and r.expected >= at_least),
        key=lambda r: (_share(r), -r.expected),
        default=None,
    )


def best(comparisons: Sequence[Comparison], at_most: float) -> Comparison | None:
    """The best point whose relative latency is at most `at_most`."""
    return max(
        (r for r in comparisons if _share(r) <= at_most), key=lambda r: (r.quality, -_share(r)), default=None
    )


def _share(r: Comparison) -> float:
    return math.inf if r.time is None else r.time.share


Choices = tuple[Comparison | None, Comparison | None]


def table_two(comparisons: Sequence[Comparison]) -> dict[tuple[float, float | None], dict[str, Choices]]:
    """Table 2 of Narasimhan et al. (2025), for each (temperature, top_p): method -> (fastest point with at
    least the verifier's quality, best point within the verifier's latency). None if there is no such
    point."""
    tables: dict[tuple[float, float | None], dict[str, Choices]] = {}
    for r in comparisons:
        if r.name not in SINGLE_MODEL and r.time is not None:
            key = r.panel.temperature, r.panel.top_p
            if r.name not in tables.setdefault(key, {}):
                group = [other for other in comparisons if other.name == r.name and other.panel == r.panel]
                verifier = next(v for v in comparisons if v.point == r.panel)
                tables[key][r.name] = fastest(group, verifier.quality), best(group, 1.0)
    return tables
