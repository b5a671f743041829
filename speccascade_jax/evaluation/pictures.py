"""Draws the pictures that a record declares from its tables.

A record's `pictures` has for each NAME an alternative text (`alt`), the panels, the number of panels per row
(`across`, default 1) and whether they `share` the scale of "x" or "y". A panel has a `title`, the `table`
that it shows, and

    x, y        a cell of each row: a column's name or position. A cell may hold several figures, and
                {"column": ..., "part": 1} is the second. A figure's interval is a bar
    names       instead of y: the columns whose cells name a row, each a column or [column, "blocks of {}"].
                Rows stand below each other
    by          the column, given likewise, whose cells name the series that a row belongs to
    series      instead of x, y and by: a list of {"label": ..., "x": ..., "y": ...}
    rows        {column: cells}: only these rows
    from        the first cell of the row that the intervals of y are differences from; a line marks it
    bare        only the interval is shown, without a point
    transposed  the table's columns are its rows
    xlabel, ylabel, xlevel, ylevel    titles of the axes, and where a line shows what to compare with

PAGE.md shows a picture between two comments, like tables. NAME.svg contains the numbers that it shows.
"""

import json
import re
from collections.abc import Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any

from speccascade_jax.evaluation.plots import COLOURS, GREY, INK, MARKERS, PAPER

Panel = Mapping[str, Any]
Point = list[float | None]
"""A figure and the ends of its interval."""
Drawn = dict[str, list[list[Any]]]
"""The points of each series, as [x, y] or [x, name]."""

AMOUNT = r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
FIGURE = re.compile(rf"(?<![\w.(])({AMOUNT})(?![\w.])%?(?: \(({AMOUNT})(?:,| to) ({AMOUNT})\))?")
LOOK: Any = {
    "svg.hashsalt": "speccascade_jax",
    "svg.fonttype": "none",  # the reader's own fonts, most of which are narrower than the one measured here
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "font.size": 9,
}
WIDTH = 7.2
"""The width of a picture in inches, that of a page's text."""


def figures(cell: str) -> list[Point]:
    """The figures in a cell, each with the ends of its interval.

    >>> figures("**1.9** (1.7 to +2.1), 0.5")
    [[1.9, 1.7, 2.1], [0.5, None, None]]
    """
    matches = FIGURE.findall(plain(cell))
    return [[float(n.replace(",", "")) if n else None for n in figure] for figure in matches]


def plain(cell: str) -> str:
    return re.sub(r"[*`]", "", cell)


class _Table:
    def __init__(self, record: Mapping[str, Any], panel: Panel):
        name = panel["table"]
        if name not in record["tables"]:
            raise ValueError(f"a picture shows the table {name!r}; known: {', '.join(record['tables'])}.")
        table = record["tables"][name]
        lines: list[Sequence[str]] = [table["columns"], *table["rows"]]
        if panel.get("transposed"):
            lines = list(zip(*lines, strict=True))
        self.name = name
        self.columns, self.rows = lines[0], lines[1:]

    def at(self, column: str | int) -> int:
        if isinstance(column, int) and column < len(self.columns):
            return column
        if column not in self.columns:
            raise ValueError(f"a picture shows the column {column!r}, which table {self.name!r} lacks.")
        return self.columns.index(str(column))

    def kept(self, only: Mapping[str, Sequence[str]]) -> list[Sequence[str]]:
        places = {self.at(column): cells for column, cells in only.items()}
        return [row for row in self.rows if all(row[n] in cells for n, cells in places.items())]

    def called(self, row: Sequence[str], where: Any) -> str:
        column, words = where if isinstance(where, list) else (where, "{}")
        cell = row[self.at(column)]
        return words.format(plain(cell)) if cell else ""

    def point(self, row: Sequence[str], where: Any) -> Point | None:
        column, part = (where["column"], where["part"]) if isinstance(where, Mapping) else (where, 0)
        told = figures(row[self.at(column)])
        return told[part] if part < len(told) else None


def points(record: Mapping[str, Any], panel: Panel) -> Drawn:
    """The points of a panel. Raises ValueError for a table or column that the record lacks, and if no cell
    holds a figure."""
    table, drawn = _Table(record, panel), Drawn()
    for series in panel.get("series", [panel]):
        for row in table.kept(panel.get("rows", {}) | series.get("rows", {})):
            label = table.called(row, series["by"]) if "by" in series else series.get("label", "")
            x = table.point(row, series["x"])
            y: Any
            if "names" in panel:
                y = ", ".join(filter(None, (table.called(row, column) for column in panel["names"])))
            else:
                y = table.point(row, series["y"])
            if x is None or y is None:
                continue
            if panel.get("bare"):
                x = [None, *x[1:]]
            if "from" in panel and y[1] is not None:
                base = _base(table, panel)
                y = [y[0], *(round(base + end, 6) for end in y[1:])]
            drawn.setdefault(label, []).append([x, y])
    if not drawn:
        raise ValueError(f"a picture shows the table {table.name!r}, and finds no figure there.")
    return drawn


def _base(table: _Table, panel: Panel) -> float:
    """The figure to which a panel's intervals, which are differences, are added."""
    for row in table.rows:
        told = table.point(row, panel["y"]) if row[0] == panel["from"] else None
        if told is not None and told[0] is not None:
            return told[0]
    raise ValueError(f"a picture compares with {panel['from']!r}, and table {table.name!r} lacks its figure.")


def figure(record: Mapping[str, Any], name: str) -> Any:
    """Draws a picture of the record as a matplotlib Figure. Call it and save the result within
    `rc_context(LOOK)`."""
    from matplotlib.figure import Figure  # imported here because it takes a second

    picture = record["pictures"][name]
    across = picture.get("across", 1)
    panels = [(panel, points(record, panel)) for panel in picture["panels"]]
    rows = [panels[n : n + across] for n in range(0, len(panels), across)]
    labels = list(dict.fromkeys(label for _, drawn in panels for label in drawn))
    looks = {label: (COLOURS[n % len(COLOURS)], MARKERS[n % len(MARKERS)]) for n, label in enumerate(labels)}
    heights = [max(_height(panel, drawn) for panel, drawn in row) for row in rows]
    made = Figure((WIDTH, sum(heights) + 0.3), layout="constrained", facecolor=PAPER)
    grid = made.subplots(len(rows), across, squeeze=False, height_ratios=heights)
    for line, row in zip(grid, rows, strict=True):
        for n, axes in enumerate(line):
            if n >= len(row):
                axes.set_axis_off()
                continue
            panel, drawn = row[n]
            _frame(axes, panel)
            if "names" in panel:
                alike = n > 0 and _names(drawn) == _names(row[n - 1][1])
                _rows(axes, drawn, looks, shown=not alike)
            else:
                _curves(axes, drawn, looks)
                if "from" in panel:
                    axes.axhline(_base(_Table(record, panel), panel), color=INK, lw=0.9, ls=":", zorder=1)
    for axis in picture.get("share", ""):
        limits = [getattr(axes, f"get_{axis}lim")() for axes in made.axes]
        for axes in made.axes:
            axes.set(**{f"{axis}lim": (min(low for low, _ in limits), max(high for _, high in limits))})
    if len(labels) > 1:
        _legend(made, looks)
    return made


def _names(drawn: Drawn) -> list[str]:
    return list(dict.fromkeys(name for points in drawn.values() for _, name in points))


def _height(panel: Panel, drawn: Drawn) -> float:
    """The height of a panel in inches."""
    if "names" not in panel:
        return 2.9
    return 0.85 + len(_names(drawn)) * max(0.3, 0.17 * len(drawn))


def _frame(axes: Any, panel: Panel) -> None:
    axes.set(facecolor=PAPER, xlabel=panel.get("xlabel", ""), ylabel=panel.get("ylabel", ""))
    axes.set_title(panel["title"], fontsize=9.5, loc="left")
    axes.grid(alpha=0.25, axis="x" if "names" in panel else "both")
    axes.spines[["top", "right"]].set_visible(False)
    if "xlevel" in panel:
        axes.axvline(panel["xlevel"], color=INK, lw=0.9, ls=":", zorder=1)
    if "ylevel" in panel:
        axes.axhline(panel["ylevel"], color=INK, lw=0.9, ls=":", zorder=1)


def _rows(axes: Any, drawn: Drawn, looks: Mapping[str, tuple[str, Any]], shown: bool) -> None:
    """Draws rows below each other, and the series of a row below each other."""
    names = _names(drawn)
    step = 0.7 / len(drawn)
    for n, (label, series) in enumerate(drawn.items()):
        colour, marker = looks[label]
        shift = step * (n - (len(drawn) - 1) / 2)
        placed = [(*x, names.index(name) + shift) for x, name in series]
        ends = [(low, high, at) for _, low, high, at in placed if low is not None]
        if ends:
            low, high, at = zip(*ends, strict=True)
            axes.hlines(at, low, high, color=colour, lw=1.8, alpha=0.5)
        middles = [(x, at) for x, _, _, at in placed if x is not None]
        if middles:
            axes.plot(*zip(*middles, strict=True), color=colour, marker=marker, ms=5, lw=0, zorder=3)
        else:  # only intervals, some of zero width
            axes.plot([*low, *high], [*at, *at], color=colour, marker="|", ms=6, lw=0)
    axes.hlines(
        [n - 0.5 for n in range(1, len(names))],
        0,
        1,
        GREY,
        lw=0.5,
        alpha=0.3,
        transform=axes.get_yaxis_transform(),
    )
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names if shown else [""] * len(names))
    axes.tick_params(axis="y", length=0)


def _curves(axes: Any, drawn: Drawn, looks: Mapping[str, tuple[str, Any]]) -> None:
    for label, series in drawn.items():
        colour, marker = looks[label]
        middles = [(x[0], y[0]) for x, y in series]
        axes.plot(*zip(*middles, strict=True), color=colour, marker=marker, ms=5, lw=1.3, zorder=3)
        up = [(x[0], *y[1:]) for x, y in series if y[1] is not None]
        sideways = [(y[0], *x[1:]) for x, y in series if x[1] is not None]
        for bars, ends in ((axes.vlines, up), (axes.hlines, sideways)):
            if ends:
                bars(*zip(*ends, strict=True), color=colour, lw=1.8, alpha=0.5)
    across = sorted({x[0] for series in drawn.values() for x, _ in series})
    if all(x == int(x) for x in across):
        axes.set_xticks(across)


def _legend(made: Any, looks: Mapping[str, tuple[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    made.legend(
        handles=[
            Line2D([], [], label=label, color=colour, marker=marker, ms=5, lw=0)
            for label, (colour, marker) in looks.items()
        ],
        loc="outside lower center",
        ncols=min(len(looks), 4 if max(map(len, looks)) < 24 else 2),
        frameon=False,
        handletextpad=0.3,
        columnspacing=1.5,
    )


def shown(record: Mapping[str, Any], name: str) -> str:
    """The numbers of a picture, in the form stored in its file."""
    return json.dumps([points(record, panel) for panel in record["pictures"][name]["panels"]])


def kept(path: Path) -> str:
    """The numbers that a drawn file contains."""
    match = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(encoding="utf-8"), re.DOTALL)
    if match is None:
        raise ValueError(f"{path} does not tell the numbers that it shows.")
    return unescape(match[1])


def draw(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes the record's pictures, if any, and returns their paths. With the same version of matplotlib, a
    record always gives the same bytes."""
    if not record.get("pictures"):
        return []
    from matplotlib import rc_context

    paths = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in record["pictures"].items():
        about = {"Date": None, "Title": picture["alt"], "Description": shown(record, name)}
        paths.append(folder / f"{name}.svg")
        with rc_context(LOOK):
            figure(record, name).savefig(paths[-1], metadata=about)
    return paths
