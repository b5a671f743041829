"""Plots of a sweep: quality against cost, with a panel for each block size, temperature and top-p."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from speccascade_jax.baselines import BASELINES
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers.named import SINGLE_MODEL
from speccascade_jax.core.transforms import TRUNCATIONS
from speccascade_jax.evaluation.quality import METRICS
from speccascade_jax.evaluation.reductions import Comparison
from speccascade_jax.evaluation.sweep import COMPARED, block_size_of
from speccascade_jax.settings import NAMED

Axis = Callable[[Comparison], float | None]
AXES: dict[str, tuple[str, Axis]] = {  # the costs that quality is plotted against
    "latency": ("Time relative to the verifier alone (share)", lambda r: r.time.share if r.time else None),
    "rejected": ("Drafted tokens rejected (share)", lambda r: r.rejection_rate),
    "deferred": ("Drafted tokens deferred (share)", lambda r: r.deferral_rate),
    "calls": ("Verifier calls per token", lambda r: r.calls_per_token),
}
INK, GREY, PAPER = "#1a1a1a", "#7F7F7F", "#ffffff"  # opaque, so that it is also readable on a dark page
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#7A5195",
    "#B8860B",
    "#56B4E9",
    "#8C564B",
    "#4D4D4D",
    "#2F4B7C",
    "#C2185B",
    "#6B8E23",
    "#E69F00",
    "#17A2B8",
)  # distinct for most kinds of colour blindness
MARKERS = (*"osD^vXPphd<>", (4, 1, 0), (3, 1, 0))  # markers distinguish the rest; the last two are stars
CURVES: tuple[dict[str, Any], ...] = (
    {"ls": "-"},
    {"ls": "-.", "fillstyle": "none"},
    {"ls": ":", "fillstyle": "left"},
    {"ls": (0, (5, 1)), "fillstyle": "top"},
    {"ls": (0, (1, 3)), "fillstyle": "right"},
    {"ls": (0, (8, 3)), "fillstyle": "bottom"},
)  # the line styles of one method's curves
LOOKS: tuple[dict[str, Any], ...] = (
    {"marker": "*", "ms": 12, "ls": ":"},
    {"marker": "H", "ms": 9, "ls": "-."},
)
ALONE = dict(zip(SINGLE_MODEL, LOOKS, strict=True))


def draw(results: Sequence[Comparison], metric: str, folder: Path) -> list[Path]:
    """Writes quality_NAME.png for each of AXES that was measured, and returns their paths. Bars are 95%
    intervals of the difference from the verifier."""
    written = []
    for name in AXES:
        figure = page(results, metric, name)
        if figure is not None:
            written.append(folder / f"quality_{name}.png")
            figure.savefig(written[-1], dpi=150)
    return written


def page(results: Sequence[Comparison], metric: str, name: str) -> Any:
    """The matplotlib Figure of one of AXES; None if nothing was measured for it. All names are in a legend
    outside the panels.
    """
    from matplotlib.figure import Figure  # here, for it takes a second to import
    from matplotlib.lines import Line2D

    label, x = AXES[name]
    if not any(x(r) is not None for r in results if r.name not in SINGLE_MODEL):
        return None
    rows = list(dict.fromkeys((r.panel.temperature, r.panel.top_p) for r in results))
    columns = sorted(
        {block_size_of(r.point) for r in results if block_size_of(r.point)},
        key=lambda size: (type(size).__name__, size),
    ) or [0]
    style = _styles(results)
    placed = {r.name for r in results if x(r) is not None}
    looks = {model: _alone(model) | ({} if model in placed else {"marker": ""}) for model in SINGLE_MODEL}
    looks |= {name: look for name, look in style.items() if name in placed}
    height = max(3.8 * len(rows), 0.23 * len(looks) + 0.2)  # the legend is higher if there are many names
    figure = Figure((4.0 * len(columns) + 1.6, height), layout="constrained", facecolor=PAPER)
    panels = figure.subplots(len(rows), len(columns), squeeze=False)
    for line, (temperature, top_p) in zip(panels, rows, strict=True):
        for axes, size in zip(line, columns, strict=True):
            title = f"Temperature {temperature:g}" + (f", top-p {top_p:g}" if top_p else "")
            axes.set(xlabel=label, ylabel=METRICS[metric].label, facecolor=PAPER)
            axes.set_title(title + (f", block size {size}" if size else ""), fontsize=10)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            _curves(
                axes,
                [
                    r
                    for r in results
                    if (r.panel.temperature, r.panel.top_p) == (temperature, top_p)
                    and block_size_of(r.point) in (0, size)
                ],
                x,
                style,
            )
    figure.legend(
        handles=[Line2D([], [], label=_title(name), **look) for name, look in looks.items()],
        loc="outside right upper",
        fontsize=8,
        frameon=False,
        labelspacing=0.9,
        handlelength=3,
    )
    return figure


def _title(name: str) -> str:
    if name in SINGLE_MODEL:
        return f"{name.capitalize()} alone"
    curve, _, kind = name.partition(", ")
    method, _, unusual = curve.partition(" (")
    entry = NAMED.get(method)
    shown = (entry.label if entry else "") or method.replace("_", " ").capitalize()
    shown += f", {kind.replace('_', '-')}" if kind else ""
    said = ["lossless"] * _lossless(name) + [unusual.removesuffix(")")] * bool(unusual)
    return f"{shown} ({'; '.join(said)})" if said else shown


def _method(name: str) -> str:
    """The method that a curve belongs to."""
    return name.partition(" (")[0]


def _lossless(name: str) -> bool:
    method = METHODS.get(_method(name))
    return method is not None and method.lossless and ", " not in name


def _alone(model: str) -> dict[str, Any]:
    return {**ALONE[model], "color": INK, "mec": PAPER, "lw": 0.9}


def _styles(results: Sequence[Comparison]) -> dict[str, dict[str, Any]]:
    """The style of each method: fixed for COMPARED, with unused colours for the others. Each curve of a
    method has its own line style and marker."""
    every = list(dict.fromkeys(r.name for r in results if r.name not in SINGLE_MODEL))
    names = [name for name in every if ", " not in name]
    methods = dict.fromkeys(map(_method, names))
    places = {name: n for n, name in enumerate(COMPARED) if name in methods}
    free = cycle([n for n in range(len(COLOURS)) if n not in places.values()])
    places |= {name: next(free) for name in methods if name not in places}
    curve = {"ms": 4.5, "lw": 1.4}
    point = {"ms": 11, "ls": "", "mec": INK, "zorder": 6}  # a lossless method does not depend on alpha
    style: dict[str, dict[str, Any]] = {}
    for method, n in places.items():
        for name, look in zip([x for x in names if _method(x) == method], cycle(CURVES)):
            style[name] = {
                **look,
                "ls": "--" if name in BASELINES else look["ls"],
                "color": COLOURS[n],
                "marker": MARKERS[n],
                **(point if _lossless(name) else curve),
            }
    for name in every:  # truncated verifiers are grey
        method, _, kind = name.partition(", ")
        if kind:
            single = method in SINGLE_MODEL
            style[name] = {
                "ls": ":" if single else "-",
                "color": GREY,
                "lw": 1.2,
                "ms": 6,
                "mec": INK if single else GREY,
                "marker": f"${TRUNCATIONS[kind].letter}$",
            }
    return style


def _curves(axes: Any, results: list[Comparison], x: Axis, style: dict[str, dict[str, Any]]) -> None:
    models = {r.name: r for r in results if r.name in SINGLE_MODEL}
    for name, look in style.items():
        points = [
            (at, r)
            for r in sorted(results, key=lambda r: r.lenience)
            if r.name == name and (at := x(r)) is not None
        ]
        if points:
            axes.plot([at for at, _ in points], [r.quality for _, r in points], **look)
            for at, r in points:
                low, high = (models["verifier"].quality + gain for gain in r.gain)
                axes.vlines(at, low, high, color=look["color"], alpha=0.2, lw=1.6)
    for name, r in models.items():
        axes.axhline(r.quality, color=INK, lw=0.9, ls=ALONE[name]["ls"])
        at = x(r)
        if at is not None:
            axes.plot(at, r.quality, zorder=5, **_alone(name))


def lines(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, tuple[float, float, float]]]]],
    xlabel: str,
    ylabel: str,
    level: float | None = None,
) -> Any:
    """A matplotlib Figure with a panel for each title: named curves of (x, (y, low, high)), their intervals
    as bars, and a horizontal line at `level`."""
    from matplotlib.figure import Figure  # here, for it takes a second to import

    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    figure = Figure(
        (4.0 * len(panels) + 2.2, max(3.8, 0.23 * len(names))), layout="constrained", facecolor=PAPER
    )
    shown: dict[str, Any] = {}
    for axes, (title, curves) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        axes.set(xlabel=xlabel, ylabel=ylabel, facecolor=PAPER)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if level is not None:
            axes.axhline(level, color=INK, lw=0.9, ls=":")
        for name, points in curves.items():
            n = names.index(name) % len(COLOURS)
            across, (middle, low, high) = [x for x, _ in points], zip(*(y for _, y in points), strict=True)
            [shown[name]] = axes.plot(across, middle, color=COLOURS[n], marker=MARKERS[n], ms=4.5, lw=1.4)
            axes.vlines(across, low, high, color=COLOURS[n], alpha=0.4, lw=1.6)
        across = sorted({x for points in curves.values() for x, _ in points})
        if all(isinstance(x, int) for x in across):
            axes.set_xticks(across)
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=8, frameon=False)
    return figure
