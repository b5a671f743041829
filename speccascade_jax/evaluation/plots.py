"""The pictures of a sweep: quality against what it costs, a panel for each gamma and temperature."""

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from speccascade_jax.core.baselines import BASELINES
from speccascade_jax.evaluation.sweep import COMPARED, MODELS, Result

Axis = Callable[[Result], float | None]
AXES: dict[str, tuple[str, Axis]] = {  # what quality is drawn against
    "latency": ("time relative to the verifier alone", lambda r: r.latency),
    "rejected": ("share of drafted tokens rejected", lambda r: r.rejection_rate),
    "deferred": ("share of drafted tokens deferred", lambda r: r.deferral_rate),
    "calls": ("verifier calls a token", lambda r: r.calls_per_token)}
INK, PAPER = "#1a1a1a", "#ffffff"  # opaque: a dark page shows it as a white card
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#7A5195", "#B8860B", "#56B4E9", "#8C564B",
           "#4D4D4D", "#2F4B7C")  # apart for most kinds of colour blindness; markers tell the rest
MARKERS = "osD^vP*Xhp"


def draw(results: Sequence[Result], metric: str, folder: Path) -> list[Path]:
    """Writes quality_NAME.png for each of AXES that was measured: their paths. Bars are 95% intervals of
    the difference from the verifier."""
    style = _styles(results)
    temperatures = sorted({r.point.temperature for r in results})
    gammas = sorted({r.point.gamma for r in results if r.point.gamma}) or [0]
    written = []
    for name, (label, x) in AXES.items():
        if any(x(r) is not None for r in results if r.point.method not in MODELS):
            panels = [[_at(results, t, g) for g in gammas] for t in temperatures]
            titles = [[f"temperature {t:g}" + (f", gamma {g}" if g else "") for g in gammas]
                      for t in temperatures]
            written.append(_page(panels, titles, x, style, label, metric, folder / f"quality_{name}.png"))
    return written


def _styles(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    names = list(dict.fromkeys(r.point.method for r in results if r.point.method not in MODELS))
    places = {name: n for n, name in enumerate(COMPARED) if name in names}  # the same in every picture
    free = [n for n in range(len(COLOURS)) if n not in places.values()]
    places |= zip((name for name in names if name not in COMPARED), cycle(free), strict=False)
    return {name: {"color": COLOURS[places[name]], "marker": MARKERS[places[name]],
                   "ls": "--" if name in BASELINES else "-"} for name in names}


def _at(results: Sequence[Result], temperature: float, gamma: int) -> list[Result]:
    return [r for r in results if r.point.temperature == temperature and r.point.gamma in (0, gamma)]


def _page(panels: list[list[list[Result]]], titles: list[list[str]], x: Axis,
          style: dict[str, dict[str, Any]], label: str, metric: str, path: Path) -> Path:
    from matplotlib.figure import Figure  # here, for it takes a second to import
    rows, columns = len(panels), len(panels[0])
    figure = Figure(figsize=(5.6 * columns, 4.2 * rows), layout="constrained", facecolor=PAPER)
    grid = figure.subplots(rows, columns, squeeze=False)
    for line, row, names in zip(grid, panels, titles, strict=True):
        for axes, results, title in zip(line, row, names, strict=True):
            axes.set(title=title, xlabel=label, ylabel=metric, facecolor=PAPER)
            axes.title.set_fontsize(10)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            _curves(axes, results, x, style)
    figure.savefig(path, dpi=150)
    return path


def _curves(axes: Any, results: list[Result], x: Axis, style: dict[str, dict[str, Any]]) -> None:
    ends = []
    alone = {r.point.method: r for r in results if r.point.method in MODELS}
    for name, look in style.items():
        points = [(at, r) for r in sorted(results, key=lambda r: r.point.alpha)
                  if r.point.method == name and (at := x(r)) is not None]
        if points:
            places = [(at, r.quality) for at, r in points]
            axes.plot(*zip(*places, strict=True), lw=1.4, ms=4, **look)
            for at, r in points:
                low, high = (alone["verifier"].quality + gain for gain in r.gain)
                axes.vlines(at, low, high, color=look["color"], alpha=0.2, lw=2)
            ends.append((name, max(places), look["color"]))
    for name, r in alone.items():
        above = r.quality == max(other.quality for other in alone.values())
        axes.axhline(r.quality, color=INK, lw=0.8, ls=":")
        at = x(r)
        if at is not None:
            axes.plot(at, r.quality, marker="*" if name == "verifier" else "o", color=INK, ms=11, mec=PAPER,
                      zorder=5)
        # Without a place of its own a model is its line, named at the left border.
        axes.annotate(name, (at or 0, r.quality), xycoords="data" if at is not None else (
            "axes fraction", "data"), xytext=(8, 4 if above else -10), textcoords="offset points",
            color=INK, fontsize=8, fontweight="bold")
    _name_lines(axes, ends)


def _name_lines(axes: Any, ends: list[tuple[str, tuple[float, float], str]]) -> None:
    """Each line's name at the right border, near the height of its rightmost point."""
    if not ends:
        return
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    axes.set_xlim(left, right + 0.02 * (right - left))
    ends = sorted(ends, key=lambda end: end[1][1])
    heights, step = [(y - low) / (high - low) for _, (_, y), _ in ends], 0.055
    for _ in range(200):  # names that are too close push each other apart, within the panel's height
        heights[0], heights[-1] = max(heights[0], 0.0), min(heights[-1], 1.0)
        for n in range(len(heights) - 1):
            push = max(0.0, step - (heights[n + 1] - heights[n])) / 2
            heights[n], heights[n + 1] = heights[n] - push, heights[n + 1] + push
    for (name, (px, py), colour), y in zip(ends, heights, strict=True):
        axes.annotate(name, (px, py), xytext=(1.02, y), color=colour,
                      textcoords="axes fraction", fontsize=8, va="center",
                      arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.5, "alpha": 0.6})
