"""Sweeps on toy models: timing, compilation, resumption and refusals."""

import dataclasses
import json
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from toys import pair

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.samplers import Autoregressive
from speccascade_jax.evaluation import sweep
from speccascade_jax.evaluation.sweep import OneShape, block_size_of, contests, grid
from speccascade_jax.inference.text import Cascade
from speccascade_jax.settings import NAMED, Settings, named

SOURCES = ["1", "12", "2", "21", "0", "1", "20", "10"] * 3
REFERENCES = [[text[::-1], "1 2 3"] for text in SOURCES]
BASE = Settings()
SMALL_GRID = {"methods": ["token_v3"], "alphas": [0.5], "block_sizes": [3], "temperatures": [0.0]}
NAN = pytest.approx(float("nan"), nan_ok=True)


@cache
def one_shape(kind=OneShape) -> OneShape:
    """The same one for all tests, with its compiled programs."""
    return kind(**{f.name: getattr(pair(), f.name) for f in dataclasses.fields(Cascade)})


def measure(cascade, points, path, **settings):
    return sweep.measure_quality(
        cascade,
        points,
        SOURCES,
        REFERENCES,
        "exact_match",
        path,
        settings,
        batch_size=8,
        track=lambda items, name: iter(items),
    )


def time(cascade, points, path, trials=2, track=lambda items, name: iter(items)):
    return sweep.measure_latency(cascade, points, SOURCES[:3], path, {}, trials=trials, track=track)


def test_no_point_is_always_timed_after_the_same_one(tmp_path):
    """A program is faster after itself than after another: neighbours must change."""
    calls = []

    class Spy(OneShape):
        def generate(self, texts, settings, **options):
            calls.append((settings.method, settings.alpha))
            return super().generate(texts, settings, **options)

    cascade = one_shape(Spy)
    points = grid(BASE, ["token_v3"], [0.1, 0.3, 0.5], [2], [0.0])
    time(cascade, points, tmp_path / "latency.jsonl")
    size = len(points)
    rounds = [calls[-size * n :][:size] for n in range(6, 0, -1)]
    assert all(sorted(r) == sorted((p.method, p.alpha) for p in points) for r in rounds)
    assert len({two for r in rounds for two in pairwise(r)}) > size  # a rotation has no more


def test_truncations_appear_once_at_temperature_zero():
    """They change no text there; their values are checked all the same."""
    points = grid(BASE, ["opt"], [0.1], [2], [0.0, 1.0], [None, 0.5])
    assert {(point.temperature, point.top_p) for point in points} == {(0.0, None), (1.0, None), (1.0, 0.5)}
    with pytest.raises(FieldError) as refused:
        grid(BASE, ["opt"], [0.1], [2], [0.0], [None, 0.0])
    assert refused.value.field == "top_p"


@pytest.mark.full
def test_a_sweep_compiles_once_a_method_and_block_size(tmp_path):
    """However many leniences, temperatures and values of top-p it has."""
    methods = ["token_v3", "lossy", "token_cascade", "sequence"]
    cascade = one_shape()
    few = grid(BASE, methods, [0.5], [2, 3], [1.0], [0.9])
    measure(cascade, few, tmp_path / "few.jsonl")
    programs = cascade.clock.compilations
    points = grid(BASE, methods, [n / 10 for n in range(11)], [2, 3], [0.0, 0.3, 1.0], [0.9, 0.5])
    qualities = measure(cascade, points, tmp_path / "quality.jsonl")
    assert set(qualities) == set(points) and len(points) > 20 * len(few) / 2
    assert cascade.clock.compilations == programs


class Killed(Exception):
    pass


def stopping(after):
    """A `track` that dies before item number `after`."""

    def track(items, name):
        for n, item in enumerate(items):
            if n == after:
                raise Killed
            yield item

    return track


@pytest.mark.full
def test_a_killed_sweep_resumes(tmp_path):
    points = grid(BASE, ["token_v3", "sequence"], [0.2, 0.7], [2], [1.0])
    cascade = one_shape()
    whole = measure(cascade, points, tmp_path / "whole.jsonl")
    path = tmp_path / "quality.jsonl"
    path.write_bytes((tmp_path / "whole.jsonl").read_bytes()[:-25])  # cut inside its last line
    (tmp_path / "quality.jsonl.settings.json").write_text("{}")
    again = measure(cascade, points, path)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    for point in points:
        np.testing.assert_array_equal(again[point].statistics, whole[point].statistics)
    with pytest.raises(FieldError) as refused:
        measure(cascade, points, path, seed=1)
    assert (refused.value.field, refused.value.value) == ("output", str(path))

    with pytest.raises(Killed):
        time(cascade, points, tmp_path / "latency.jsonl", track=stopping(4))
    timed = time(cascade, points, tmp_path / "latency.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "latency.jsonl").read_text().splitlines()]
    done = [(line["trial"], line["example"]) for line in lines]
    assert done == [(t, n) for t in range(2) for n in range(3)]
    for k, point in enumerate(points):
        np.testing.assert_allclose(
            timed[point].seconds,
            [sum(line["seconds"][k] for line in lines if line["example"] == n) for n in range(3)],
        )


def test_a_grid_holds_each_point_once():
    points = grid(
        BASE,
        ["token_v3", "chow", "speculative", "token_cascade", "bild", "verifier"],
        [0.2, 1.0],
        [2, 3, 2],
        [0.0, 1.0],
        [None, 0.9],
    )
    assert len(points) == len(set(points))
    at = [p for p in points if (p.temperature, p.top_p) == (1.0, 0.9)]
    # The models; two rules at two alphas and block sizes; the lossless rule at two block sizes; a baseline.
    assert len(at) == 2 + 2 * 2 * 2 + 2 + 2 and not any(p.method == "bild" for p in at)
    assert {p.alpha for p in points if p.method == "bild"} == {2.0, 10.0}
    assert [p.method for p in points[:2]] == ["verifier", "drafter"]
    assert {block_size_of(p) for p in points if p.method == "token_cascade"} == {0}


@pytest.mark.parametrize(
    "change,field,value",
    [
        ({"methods": []}, "methods", []),
        ({"alphas": []}, "alphas", []),
        ({"block_sizes": []}, "block_sizes", []),
        ({"temperatures": []}, "temperatures", []),
        ({"top_ps": []}, "top_ps", []),
        ({"block_sizes": [3, 0]}, "block_sizes", 0),
        ({"block_sizes": [-1]}, "block_sizes", -1),
        ({"methods": ["sequence"], "block_sizes": [0]}, "block_sizes", 0),
        ({"alphas": [float("nan")]}, "alphas", NAN),
        ({"alphas": [-0.1]}, "alphas", -0.1),
        ({"alphas": [1.5]}, "alphas", 1.5),
        ({"alphas_after": [0.5]}, "alphas_after", [0.5]),
        ({"base": Settings(alpha_after={"x": 0.0}), "alphas_after": []}, "alphas_after", []),
        ({"base": Settings(alpha_after={"x": 0.0}), "alphas_after": [2.0]}, "alphas_after", 2.0),
        ({"verifications": []}, "verifications", []),
        ({"methods": ["opt", "token_v3", "opt"]}, "methods", "opt"),
        ({"methods": ["../../x"]}, "methods", "../../x"),
        ({"methods": [""]}, "methods", ""),
    ],
)
def test_an_invalid_grid_is_refused(change, field, value):
    with pytest.raises(FieldError) as refused:
        grid(**{"base": BASE} | SMALL_GRID | change)
    assert (refused.value.field, refused.value.value) == (field, value)


@pytest.mark.parametrize(
    "change,field,value",
    [
        ({"temperatures": [float("nan")]}, "temperature", NAN),
        ({"temperatures": [-1.0]}, "temperature", -1.0),
        ({"top_ps": [0.0]}, "top_p", 0.0),
        ({"top_ps": [float("nan")]}, "top_p", NAN),
    ],
)
def test_a_grid_refuses_invalid_settings(change, field, value):
    with pytest.raises(FieldError) as refused:
        grid(BASE, **SMALL_GRID | change)
    assert (refused.value.field, refused.value.value) == (field, value)


def test_leniences_beyond_one_are_for_rules_without_a_bound():
    assert {p.alpha for p in grid(BASE, ["chow_log", "opt"], [3.0], [2], [1.0])} == {0.0, 3.0}
    assert {p.alpha for p in grid(BASE, ["lossy"], [1.0], [2], [1.0])} == {0.0, 0.999}


def test_a_grid_over_leniences_after_a_marker_and_verifications():
    """A rule at every pair of leniences, a lossless one at none; in both ways to verify, as BiLD's scale and
    a baseline are not."""
    base = Settings(alpha_after={"x": 0.7, "y": 0.7})
    points = grid(
        base,
        ["opt", "bild_star", "speculative", "token_cascade"],
        [0.0, 0.5],
        [2],
        [1.0],
        truncations=["top_p"],
        verifications=["token", "block"],
        alphas_after=[0.0, 1.0],
    )
    assert len(points) == len({repr(point) for point in points})
    plain = [point for point in points if point.top_p is None]
    by_method = {name: [p for p in plain if p.name == name] for name in dict.fromkeys(p.name for p in plain)}
    assert {name: len(group) for name, group in by_method.items()} == {
        "verifier": 1,
        "drafter": 1,
        "opt": 8,
        "bild_star": 8,
        "speculative": 2,
        "token_cascade": 2,
    }
    assert {(p.alpha, *p.alpha_after.items()) for p in by_method["bild_star"]} == {
        (before, ("x", after), ("y", after)) for before in (0.0, 5.0) for after in (0.0, 10.0)
    }
    assert {p.verification for p in by_method["token_cascade"] + by_method["verifier"]} == {"token"}
    assert all(not p.alpha_after for p in by_method["speculative"])
    curves = {contest.name for point in points for contest in contests(point, points)}
    assert {name for name in curves if name.startswith(("opt", "speculative"))} == {
        "opt (0/0 after)",
        "opt (1/1 after)",
        "opt (block; 0/0 after)",
        "opt (block; 1/1 after)",
        "speculative",
        "speculative (block)",
        "speculative, top_p",
    }
    fixed = grid(base, ["opt"], [0.5], [2], [1.0])  # as it was: the leniences of alpha_after
    assert [p.alpha_after for p in fixed if p.name == "opt"] == [base.alpha_after]


@pytest.mark.full
def test_both_axes_are_measured(tmp_path):
    """In one program where only leniences differ, in two for two ways to verify; read again as written."""
    base = dataclasses.replace(BASE, alpha_after={"0": 0.3})
    points = grid(
        base, ["opt"], [0.0, 0.5], [2], [1.0], verifications=["token", "block"], alphas_after=[0.0, 5.0]
    )
    cascade, path = one_shape(), tmp_path / "quality.jsonl"
    qualities = measure(cascade, points, path)
    assert set(qualities) == set(points) and len(points) == 2 + 2 * 2 * 2
    written = path.read_bytes()
    again = measure(cascade, points, path)
    assert path.read_bytes() == written
    for point in points:
        np.testing.assert_array_equal(again[point].statistics, qualities[point].statistics)
    before = cascade.clock.compilations
    timed = time(cascade, points, tmp_path / "latency.jsonl", trials=1)
    assert set(timed) == set(points)
    assert cascade.clock.compilations - before <= 4 * 4  # of batch 1: a model each, and two ways to verify


def test_a_sweep_scales_alphas_by_the_methods_scale():
    assert {p.alpha for p in grid(BASE, ["bild_star", "opt"], [0.2], [2], [0.0])} == {0.0, 2.0, 0.2}


def test_leniences_are_finer_where_a_method_changes_quickly():
    points = grid(BASE, ["token_v3", "opt"], None, [2, "adaptive"], [1.0])
    by_method = {name: sorted({p.alpha for p in points if p.method == name}) for name in ("token_v3", "opt")}
    assert len(by_method["opt"]) == 11 and sum(alpha > 0.9 for alpha in by_method["token_v3"]) == 6
    assert {block_size_of(p) for p in points} == {0, 2, "adaptive"}


@pytest.mark.parametrize(
    "damage",
    [
        {"statistics": [[1.0, 1.0]]},
        {"statistics": [[float("nan"), 1.0]] * len(SOURCES)},
        {"counts": [1]},
        {"tokens": None},
        {"point": {"method": "token_v3"}},
        {"point": 3},
    ],
)
def test_a_complete_line_that_is_not_a_measurement_is_refused(tmp_path, damage):
    points, path = grid(BASE, ["token_v3"], [0.2], [2], [1.0])[:1], tmp_path / "quality.jsonl"
    cascade = one_shape()
    measure(cascade, points, path)
    line = json.loads(path.read_text())
    path.write_text(json.dumps({**line, **damage}) + "\n")
    before = path.read_bytes()
    with pytest.raises(FieldError) as refused:
        measure(cascade, points, path)
    assert "quality.jsonl, line 1" in refused.value.problem
    assert (refused.value.field, refused.value.value) == ("output", str(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        {"example": 7},
        {"example": -1},
        {"trial": 5},
        {"seconds": [1.0]},
        {"seconds": [float("nan")] * 2},
        {"tokens": "ab"},
        {},
    ],
)
def test_a_latency_that_no_example_has_is_refused(tmp_path, damage):
    """{}: the same example a second time, which would count twice."""
    points, path = grid(BASE, ["verifier"], [0.2], [2], [1.0]), tmp_path / "latency.jsonl"
    cascade = one_shape()
    time(cascade, points, path, trials=1)
    first = path.read_text().splitlines()[0]
    path.write_text(first + "\n" + json.dumps({**json.loads(first), **damage}) + "\n")
    with pytest.raises(FieldError) as refused:
        time(cascade, points, path, trials=1)
    assert "latency.jsonl, line 2" in refused.value.problem
    assert (refused.value.field, refused.value.value) == ("output", str(path))


def test_a_sweep_includes_a_configs_sampler(tmp_path):
    """By name, like a method, both on the grid and in measurements."""

    def alone(models):
        return Autoregressive(models[-1])

    cascade = OneShape(
        **{f.name: getattr(pair(), f.name) for f in dataclasses.fields(Cascade)}
        | {"samplers": {"mine": alone}}
    )
    points = grid(BASE, ["mine"], [0.0], [3], [0.0], known={**NAMED, **named({"mine": alone})})
    assert [(p.name, block_size_of(p)) for p in points] == [("verifier", 0), ("drafter", 0), ("mine", 0)]
    qualities = measure(cascade, points, tmp_path / "quality.jsonl")
    np.testing.assert_array_equal(qualities[points[2]].statistics, qualities[points[0]].statistics)
    timed = time(cascade, points, tmp_path / "latency.jsonl", trials=1)
    assert (timed[points[2]].tokens == timed[points[0]].tokens).all()
    with pytest.raises(FieldError) as refused:
        grid(BASE, ["mine"], [0.0], [3], [0.0])
    assert (refused.value.field, refused.value.value) == ("methods", "mine")


def test_a_method_whose_time_means_nothing_is_not_timed(tmp_path):
    points = grid(BASE, ["oracle"], [0.0], [3], [0.0])
    assert set(time(one_shape(), points, tmp_path / "latency.jsonl", trials=1)) == set(points[:2])
