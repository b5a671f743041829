"""Sweeps over rules and leniences: their trade-offs, next to the drafter alone and the truncated verifier."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from speccascade_jax.config import DecodeConfig, dtype_of
from speccascade_jax.core.samplers.named import SINGLE_MODEL
from speccascade_jax.evaluation import plots
from speccascade_jax.evaluation.measurements import Measurements
from speccascade_jax.evaluation.quality import METRICS, bootstrap, score
from speccascade_jax.evaluation.reductions import Comparison, fastest
from speccascade_jax.evaluation.sweep import Quality, alone, block_size_of, grid
from speccascade_jax.experiments.findings import (
    Bench,
    Findings,
    Table,
    check_pair,
    difference,
    pair,
    table,
    task_of,
)
from speccascade_jax.settings import Settings
from speccascade_jax.training.data import joined_examples

WORSE = " *"
"""The suffix of a rule without a point at the verifier's quality."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """A pair's points on one split. The picture shows quality against time or, if not timed, verifier
    calls."""

    config: str
    methods: tuple[str, ...]
    alphas: tuple[float, ...]
    block_sizes: tuple[Any, ...]
    temperatures: tuple[float, ...]
    top_ps: tuple[float, ...] = (1.0,)  # 1 keeps all tokens
    truncations: tuple[str, ...] = ("top_p",)  # the truncated verifiers to compare with
    inputs: int
    timed: int = 0
    trials: int = 2
    dtype: str = "auto"
    split: str = "validation"
    batch_size: int = 32
    changes: tuple[tuple[str, Any], ...] = ()  # to fields of the config
    picture: str | None = None

    def check(self) -> None:
        check_pair(self.pair, self.split)

    @property
    def pair(self) -> DecodeConfig:
        return pair(self.config, dtype=self.dtype, batch_size=self.batch_size, **dict(self.changes))

    def points(self) -> list[Settings]:
        return grid(
            self.pair.settings,
            self.methods,
            self.alphas,
            self.block_sizes,
            self.temperatures,
            [None if top_p == 1 else top_p for top_p in self.top_ps],
            self.truncations,
        )

    def measurements(self, bench: Bench, split: str | None = None) -> Measurements:
        """The measurements on `split`, by default the sweep's."""
        return Measurements(
            self.pair,
            task_of(self.pair),
            split or self.split,
            limit=self.inputs,
            timed=self.timed,
            trials=self.trials,
            screen=bench.screen,
        )

    @property
    def about(self) -> str:
        """A description of the data for titles."""
        task, times = task_of(self.pair), f", times of {self.timed}" if self.timed else ""
        count = min(self.inputs, len(joined_examples(task, getattr(task, self.split))))
        return f"{count} examples of the {self.split} split in {dtype_of(self.pair)}{times}"

    @property
    def metric(self) -> str:
        return task_of(self.pair).metric

    @property
    def axis(self) -> str:
        """The x-axis of the plot, one of plots.AXES."""
        return "latency" if self.timed else "calls"

    @property
    def label(self) -> str:
        """The label of the quality axis."""
        return METRICS[self.metric].label


def shown(r: Comparison, mark: str = "") -> list[Any]:
    """A point's cells, without its panel: the decoder, its quality against both models, its costs."""
    curve, _, kind = r.name.partition(", ")
    alone = r.point.name in SINGLE_MODEL
    name = f"{curve} alone" if alone else f"`{r.point.name}`{curve.removeprefix(r.point.name)}"
    if kind:
        name += f", {kind.replace('_', '-')} {r.lenience:g}"
    time = "{:.2f} ({:.2f} to {:.2f})".format(r.time.share, *r.time.interval) if r.time else "-"
    plain = kind or alone or r.point.lossless
    return [
        name + mark,
        "" if plain else f"{r.lenience:g}",
        "" if alone else block_size_of(r.point),
        f"{r.quality:.1f}",
        "" if r.is_verifier else difference(r.gain),
        "" if r.name in SINGLE_MODEL and not r.is_verifier else difference(r.gain_over_drafter),
        time,
        f"{r.calls_per_token:.3f}",
    ]


def columns(label: str) -> list[str]:
    return [
        "decoder",
        "alpha",
        "block size",
        label,
        "over the verifier (95%)",
        "over the drafter (95%)",
        "time relative to the verifier (95%)",
        "calls per token",
    ]


def cost(r: Comparison) -> float:
    """The share of the verifier's time or, if not timed, verifier calls per token."""
    return r.calls_per_token if r.time is None else r.time.share


def row_of(points: Sequence[Comparison], verifier: Comparison) -> list[Any]:
    """The table row of one curve: the cheapest point with at least the verifier's quality, otherwise the best
    point. For a truncation, always the best point."""
    name = points[0].name
    as_good = [r for r in points if r.expected >= verifier.quality]
    if ", " in name or not as_good:
        chosen = max(points, key=lambda r: (r.expected, -cost(r)))
    else:
        chosen = min(as_good, key=cost)
    return shown(chosen, "" if as_good or name in SINGLE_MODEL else WORSE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TradeOff(Sweep):
    """Each rule's cheapest point at the verifier's quality, with a table for each temperature."""

    suffix: str = ""  # of the tables' names

    def measure(self, bench: Bench) -> Findings:
        comparisons = self.measurements(bench).measure(self.points(), bench.folder)
        tables = {
            f"{self.config}{self.suffix}-at-{temperature:g}".replace(".", "-"): self._table(
                comparisons, temperature
            )
            for temperature in self.temperatures
        }
        picture = plots.page(comparisons, self.metric, self.axis)
        return Findings(tables, {self.picture or f"trade-off-{self.config}": picture})

    def _table(self, comparisons: list[Comparison], temperature: float) -> Table:
        rows = []
        for panel in dict.fromkeys(r.panel for r in comparisons):
            if panel.temperature != temperature:
                continue
            here = [r for r in comparisons if r.panel == panel]
            verifier = next(r for r in here if r.point == panel)
            for name in dict.fromkeys(r.name for r in here):
                points = [r for r in here if r.name == name]
                rows.append([f"{panel.top_p or 1:g}", *row_of(points, verifier)])
        return table(
            f"`{self.config}` at temperature {temperature:g}, {self.about}: of each rule the cheapest point "
            f"at the verifier's quality or above ({WORSE.strip()}: there is none, the best one). The "
            "verifier is the one under the same top-p.",
            ["top-p", *columns(self.label)],
            rows,
        )


class Picks(Sweep):
    """The fastest point at the verifier's quality on the sweep's split, measured on the test split."""

    def measure(self, bench: Bench) -> Findings:
        comparisons = self.measurements(bench).measure(self.points(), bench.folder)
        rows = []
        for panel in dict.fromkeys(r.panel for r in comparisons):
            here = [r for r in comparisons if r.panel == panel]
            verifier = next(r for r in here if r.point == panel)
            rivals = [r for r in here if r.point.name not in SINGLE_MODEL and ", " not in r.name]
            picked = fastest(rivals, verifier.quality)
            if picked is None:
                continue
            points = [*(alone(panel, model) for model in SINGLE_MODEL), picked.point]
            folder = bench.folder / f"test-{panel.temperature:g}-{panel.top_p or 1:g}"
            for r in self.measurements(bench, "test").measure(points, folder):
                promise = shown(picked)[3:7] if r.point == picked.point else ["", "", "", ""]
                rows.append([f"{panel.temperature:g}", f"{panel.top_p or 1:g}", *promise, *shown(r)])
        promised = [f"{name} on {self.split}" for name in columns(self.label)[3:7]]
        title = (
            f"`{self.config}`: the fastest point at the verifier's quality on {self.about}, and both models "
            "and that point on as many of the test split."
        )
        record = table(title, ["T", "top-p", *promised, *columns(self.label)], rows)
        return Findings({self.config.replace("_", "-"): record})


class Rejections(Sweep):
    """The share of drafted tokens that each rule rejects, and its best quality."""

    def measure(self, bench: Bench) -> Findings:
        comparisons = self.measurements(bench).measure(self.points(), bench.folder)
        rows = []
        for panel in dict.fromkeys(r.panel for r in comparisons):
            here = [r for r in comparisons if r.panel == panel]
            for name in dict.fromkeys(r.name for r in here):
                best = max((r for r in here if r.name == name), key=lambda r: r.expected)
                rejected = "" if best.rejection_rate is None else f"{best.rejection_rate:.2f}"
                rows.append([f"{panel.temperature:g}", rejected, *shown(best)])
        picture = plots.page(comparisons, self.metric, "rejected")
        sizes = ", ".join(map(str, self.block_sizes))
        title = (
            f"`{self.config}` at block size {sizes}, {self.about}: each rule's point of best quality, "
            "and the share of drafts that it rejects."
        )
        record = table(title, ["T", "share of drafts rejected", *columns(self.label)], rows)
        return Findings({"rates": record}, {self.picture or "rejection": picture})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EqualCalls(Sweep):
    """Compares a rule with a rival at no more verifier calls than the rival's."""

    rule: str
    rival: str
    slack: float = 0.01  # relative excess of calls that still counts as equal

    def measure(self, bench: Bench) -> Findings:
        points = self.points()
        qualities = self.measurements(bench).qualities(points, bench.folder)
        metric, rows = self.metric, list[list[Any]]()

        def told(point: Settings, other: Settings) -> str:
            sums = [qualities[settings].statistics for settings in (point, other)]
            gain = score(metric, sums[0].sum(axis=0)) - score(metric, sums[1].sum(axis=0))
            return f"{gain:+.1f} ({difference(bootstrap(metric, *sums))})"

        for rival in (point for point in points if point.name == self.rival):
            panel = alone(rival, "verifier")
            rules = [p for p in points if p.name == self.rule and alone(p, "verifier") == panel]
            budget = (1 + self.slack) * calls(qualities[rival])
            able = [p for p in rules if p.block_size == rival.block_size and calls(qualities[p]) <= budget]
            best = max(able, key=lambda p: score(metric, qualities[p].statistics.sum(axis=0)), default=None)
            rows.append(
                [
                    f"{rival.temperature:g}",
                    f"{rival.top_p or 1:g}",
                    f"{rival.alpha:g}",
                    f"{score(metric, qualities[rival].statistics.sum(axis=0)):.1f}",
                    f"{calls(qualities[rival]):.3f}",
                    *(
                        ["-", "-", "-"]
                        if best is None
                        else [f"{best.alpha:g}", f"{calls(qualities[best]):.3f}", told(best, rival)]
                    ),
                    told(rival, panel),
                    told(rival, alone(rival, "drafter")),
                ]
            )
        return Findings({f"{self.rule}-{self.config}".replace("_", "-"): self._table(rows)})

    def _table(self, rows: list[list[Any]]) -> Table:
        return table(
            f"`{self.config}`: the best `{self.rule}` with at most {1 + self.slack:g} times the calls of "
            f"`{self.rival}`, {self.about} (95%, paired over examples).",
            [
                "T",
                "top-p",
                f"alpha of `{self.rival}`",
                self.label,
                "calls per token",
                f"alpha of `{self.rule}`",
                "calls per token",
                f"`{self.rule}` over `{self.rival}`",
                f"`{self.rival}` over the verifier",
                "over the drafter",
            ],
            rows,
        )


def calls(quality: Quality) -> float:
    """Verifier calls per token."""
    return quality.counts.get("rounds", 0) / max(quality.tokens, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spans(Sweep):
    """Every lenience before a marker, combined with every lenience after it."""

    marker: str
    alphas_after: tuple[float, ...]

    def points(self) -> list[Settings]:
        return grid(
            dataclasses.replace(self.pair.settings, alpha_after={self.marker: 0.0}),
            self.methods,
            self.alphas,
            self.block_sizes,
            self.temperatures,
            alphas_after=self.alphas_after,
        )

    def measure(self, bench: Bench) -> Findings:
        comparisons = self.measurements(bench).measure(self.points(), bench.folder)
        rows = [[f"{r.point.temperature:g}", *shown(r)] for r in comparisons]
        title = (
            f'`{self.config}`: alpha before the marker "{self.marker}" and after it, {self.about} (95%, '
            "paired over examples)."
        )
        picture = plots.page(comparisons, self.metric, self.axis)
        return Findings(
            {"spans": table(title, ["T", *columns(self.label)], rows)}, {self.picture or "spans": picture}
        )
