"""Properties that every figure of a sweep must have."""

import dataclasses
from itertools import combinations

import numpy as np
import pytest
from made_by_hand import FOUND, result
from matplotlib.collections import LineCollection
from matplotlib.image import imread
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Text

from speccascade_jax.core.transforms import TRUNCATIONS
from speccascade_jax.evaluation import plots, sweep
from speccascade_jax.evaluation.sweep import COMPARED, Contest

RNG = np.random.default_rng(0)
CROWDED = [
    *FOUND[:2],
    *(
        result(
            method,
            alpha,
            27 + 6 * alpha + RNG.normal(),
            0.4 + 0.6 * alpha + 0.1 * RNG.random(),
            5 if method not in ("token_cascade", "sequence") else 1,
        )
        for method in (*COMPARED, "token_v1")
        for alpha in ((0,) if method == "speculative" else (0, 0.3, 0.6, 1))
    ),
]


def at(results, **point):
    return [dataclasses.replace(r, point=dataclasses.replace(r.point, **point)) for r in results]


GRID = [r for t in (0.0, 1.0) for g in (3, 5) for r in at(CROWDED[2:], temperature=t, block_size=g)]
GRID += [r for t in (0.0, 1.0) for r in at(CROWDED[:2], temperature=t)]
SWEEPS = {"few": FOUND, "crowded": CROWDED, "grid": GRID}


def texts(figure):
    """(text, box in pixels) of everything that is written."""
    figure.draw_without_rendering()
    unseen = set()  # labels of ticks past the ends of their axis
    for axes in figure.axes:
        for axis, ends in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            unseen |= {
                label
                for place, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
                if not ends[0] <= place <= ends[1]
            }
    return [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and text not in unseen
    ]


def strokes(figure):
    """What is drawn as lines, as paths in pixels: curves, intervals, models' lines, leaders of names."""
    for axes in figure.axes:
        for line in axes.lines:
            yield line.get_transform().transform_path(line.get_path())
        for group in axes.collections:
            if isinstance(group, LineCollection):
                yield from map(group.get_transform().transform_path, group.get_paths())
    for arrow in figure.findobj(FancyArrowPatch):
        yield arrow.get_transform().transform_path(arrow.get_path())


def checked(figure):
    """The laws of every picture."""
    boxes = texts(figure)
    for (label, a), (other, b) in combinations(boxes, 2):
        assert not a.overlaps(b), f"{label!r} and {other!r} overlap"
    for stroke in strokes(figure):
        for text, box in boxes:
            assert not stroke.intersects_bbox(box, filled=False), f"a line crosses {text!r}"
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text


@pytest.mark.parametrize(
    "sweep,axis",
    [
        ("few", "latency"),
        ("grid", "latency"),
        ("crowded", "latency"),
        *(pytest.param("crowded", axis, marks=pytest.mark.full) for axis in plots.AXES if axis != "latency"),
    ],
)
def test_names_are_legible(sweep, axis):
    checked(plots.page(SWEEPS[sweep], "bleu", axis))


def test_the_legibility_check_detects_an_overlapped_name():
    """The control: a name in a panel, struck by a leader, by a curve or by another name."""
    for strike in (
        lambda axes: axes.annotate("far", (0.2, 24), xytext=(0.9, 30), arrowprops={"arrowstyle": "-"}),
        lambda axes: axes.plot([0.2, 0.9], [24, 30]),
        lambda axes: axes.vlines(0.55, 20, 33),
        lambda axes: axes.text(0.55, 27, "drafter", ha="center", va="center"),
    ):
        figure = plots.page(FOUND, "bleu", "latency")
        figure.axes[0].text(0.55, 27, "verifier", ha="center", va="center")
        strike(figure.axes[0])
        with pytest.raises(AssertionError, match=r"crosses '(verifier|far)'|overlap"):
            checked(figure)


def test_labels_are_words_with_units():
    figure = plots.page(at(FOUND, top_p=0.9), "rouge2", "latency")
    (axes,) = figure.axes
    assert axes.get_xlabel() == "Time relative to the verifier alone (share)"
    assert axes.get_ylabel() == "ROUGE-2" and axes.get_title() == "Temperature 1, top-p 0.9, block size 5"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["Verifier alone", "Drafter alone", "OPT", "Chow"]
    for name in plots.AXES:
        assert plots.AXES[name][0][0].isupper()


def test_the_lossless_point_is_seen_among_curves(tmp_path):
    """A single large point with a name, drawn last, is visible even where all curves meet."""
    curves = [
        result(name, alpha, 28.0 + 0.01 * alpha, 0.8 + 0.01 * alpha)
        for name in ("opt", "diff", "token_v3")
        for alpha in (0, 1)
    ]
    results = [*FOUND[:2], *curves, result("speculative", 0.0, 28.0, 0.8)]
    figure = plots.page(results, "bleu", "latency")
    assert "Speculative (lossless)" in [text.get_text() for text in figure.legends[0].get_texts()]
    colour = plots.COLOURS[COMPARED.index("speculative")]
    (point,) = (line for line in figure.axes[0].lines if line.get_color() == colour)
    others = [line for line in figure.axes[0].lines if line.get_marker() in ("o", "s", "D")]
    assert point.get_zorder() > max(line.get_zorder() for line in others)
    assert point.get_markersize() >= 2 * max(line.get_markersize() for line in others)
    figure.legends[0].remove()
    figure.savefig(tmp_path / "seen.png", dpi=150)
    rgb = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    assert (np.abs(imread(tmp_path / "seen.png")[..., :3] - rgb).max(axis=-1) < 0.02).sum() > 100


def test_a_picture_fills_a_readme(tmp_path):
    path, *_ = plots.draw(CROWDED, "bleu", tmp_path)
    assert 780 <= imread(path).shape[1] <= 860


def test_a_panel_holds_its_own_points():
    """Two values of top-p are two panels, not one curve."""
    figure = plots.page([*FOUND, *at(FOUND, top_p=0.9)], "bleu", "latency")
    assert [axes.get_title() for axes in figure.axes] == [
        "Temperature 1, block size 5",
        "Temperature 1, top-p 0.9, block size 5",
    ]
    for axes in figure.axes:
        drawn = [line for line in axes.lines if line.get_color() == plots.COLOURS[COMPARED.index("opt")]]
        assert [len(line.get_xdata()) for line in drawn] == [4]


def test_truncations_have_curves_with_names():
    def cut(kind, value, method):
        base = result(method, 0.0, 28 + 5 * value, 0.9 - 0.2 * (method == "speculative"))
        plain = FOUND[0].point
        return dataclasses.replace(base, contest=Contest(f"{method}, {kind}", value, plain))

    results = [
        *CROWDED,
        *(
            cut(kind, value, method)
            for kind in TRUNCATIONS
            for value in (0.3, 0.8)
            for method in ("verifier", "speculative")
        ),
    ]
    figure = plots.page(results, "bleu", "latency")
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"Verifier, top-p", "Speculative, min-p", "Token V3"} <= set(names)
    assert all(name[0].isupper() for name in names)
    checked(figure)


def test_pictures(tmp_path):
    """Opaque, with a curve for every method: something is drawn in each one's colour."""
    written = plots.draw([*FOUND, *at(FOUND[2:], block_size=3)], "bleu", tmp_path)
    assert [p.name for p in written] == [
        "quality_latency.png",
        "quality_rejected.png",
        "quality_deferred.png",
        "quality_calls.png",
    ]
    for path in written:
        pixels = imread(path)
        assert pixels.shape[2] == 3 or (pixels[..., 3] == 1).all()
        for colour in (plots.COLOURS[COMPARED.index(name)] for name in ("opt", "chow")):
            rgb = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
            assert (np.abs(pixels[..., :3] - rgb).max(axis=-1) < 0.02).sum() > 50
    untimed = [dataclasses.replace(r, time=None) for r in FOUND]
    assert plots.draw(untimed, "bleu", tmp_path) == written[1:]


def legend_of(results):
    """name -> (colour, marker), as the legend shows them."""
    legend = plots.page(results, "bleu", "latency").legends[0]
    return {
        text.get_text(): (line.get_color(), line.get_marker())
        for text, line in zip(legend.get_texts(), legend.findobj(Line2D), strict=True)
    }


def test_a_method_looks_the_same_in_every_picture():
    def looks(*names):
        return legend_of([*FOUND[:2], *(result(name, 0.1, 30.0, 0.5) for name in names)])

    every = looks("token_v1", "sequence", "token_v2", *(name for name in COMPARED if name != "opt"))
    assert all(
        looks("lossy_tuned", name)[plots._title(name)] == every[plots._title(name)]
        for name in COMPARED
        if name not in ("opt", "speculative")
    )


def test_the_curves_of_a_method_share_its_colour_and_marker():
    """Not their lines; and their names say what is unusual."""
    results = [
        *FOUND[:2],
        *(
            dataclasses.replace(
                r, point=dataclasses.replace(r.point, verification=way, alpha_after={"x": after})
            )
            for way in ("token", "block")
            for after in (0.0, 0.5)
            for r in (result("opt", 0.1, 30.0, 0.5), result("opt", 0.3, 29.0, 0.4))
        ),
    ]
    results = [
        dataclasses.replace(r, contest=Contest(sweep.curve_of(r.point), r.point.alpha, r.panel))
        for r in results
    ]
    looks = legend_of(results)
    names = ["OPT (0 after)", "OPT (0.5 after)", "OPT (block; 0 after)", "OPT (block; 0.5 after)"]
    assert [name for name in looks if name.startswith("OPT")] == names
    assert len({looks[name] for name in names}) == 1
    style = plots._styles(results)
    assert len({(str(look["ls"]), look.get("fillstyle")) for look in style.values()}) == len(names)
    assert plots._title("speculative (block)") == "Speculative (lossless; block)"


def test_no_two_methods_share_a_colour_or_a_marker():
    """Markers distinguish the curves without colours."""
    looks = legend_of(CROWDED)
    methods = {name: look for name, look in looks.items() if not name.endswith("alone")}
    assert len(methods) == len(COMPARED) + 1
    assert len({colour for colour, _ in methods.values()}) == len(methods)
    assert len({marker for _, marker in looks.values()}) == len(looks)
