"""Figures computed from measurements made by hand."""

import numpy as np
import pytest
from made_by_hand import FOUND

from speccascade_jax.core.transforms import TRUNCATIONS
from speccascade_jax.evaluation.rates import relative_cost
from speccascade_jax.evaluation.reductions import best, compare, fastest, table_two
from speccascade_jax.evaluation.sweep import Latency, Quality, alone, grid
from speccascade_jax.settings import Settings


def test_results_say_what_was_measured(tmp_path):
    """Rates, calls and predictions from counts made by hand; latency from seconds made by hand."""

    def quality(hits, counts, tokens, acceptance=0.0):
        rows = np.stack([np.array(hits, float), np.ones(len(hits))], axis=1)
        return Quality(rows, counts, acceptance, tokens)

    point = Settings(method="token_v3", alpha=0.2, block_size=5)
    cascade = Settings(method="token_cascade", alpha=0.2, block_size=1)
    verifier, drafter = alone(point, "verifier"), alone(point, "drafter")
    qualities = {
        verifier: quality([1, 1, 0, 0], {"model_passes": 100}, 100),
        drafter: quality([1, 0, 0, 0], {"model_passes": 80}, 80),
        point: quality(
            [1, 1, 1, 0],
            {
                "drafted": 100,
                "accepted": 75,
                "deferred": 50,
                "rounds": 20,
                "emitted": 95,
                "drafter_passes": 120,
            },
            95,
            acceptance=0.8,
        ),
        cascade: quality(
            [1, 1, 0, 0],
            {
                "drafted": 60,
                "accepted": 60,
                "deferred": 30,
                "rounds": 40,
                "emitted": 100,
                "drafter_passes": 100,
            },
            100,
        ),
    }
    seconds = {verifier: (10.0, 100), drafter: (1.0, 100), point: (5.0, 50), cascade: (8.0, 100)}
    latencies = {p: Latency(np.full(4, s / 4), np.full(4, n / 4)) for p, (s, n) in seconds.items()}
    results = {r.point: r for r in compare("exact_match", qualities, latencies)}
    r = results[point]
    assert (r.quality, r.time.share, r.deferral_rate, r.rejection_rate) == (75.0, 0.5, 0.5, 0.25)
    assert r.calls_per_token == 20 / 95 and r.time.interval == (0.5, 0.5)
    assert r.time.predicted == pytest.approx(relative_cost(0.8, 5, 0.1) * 50 / 100)
    assert results[cascade].time.predicted == pytest.approx((100 * 0.1 + 40) / 100)
    assert results[drafter].gain_over_drafter == (0.0, 0.0) and r.gain_over_drafter == (0.0, 100.0)
    assert r.gain == (0.0, 75.0)
    assert results[verifier].gain == (0.0, 0.0) and results[verifier].time.share == 1.0
    assert results[verifier].time.predicted == 1.0 and results[drafter].time.predicted == pytest.approx(0.1)


def test_table_two():
    ((key, methods),) = table_two(FOUND).items()
    assert key == (1.0, None) and list(methods) == ["opt", "chow"]
    fast, good = methods["opt"]
    assert (fast.point.alpha, good.point.alpha) == (0.3, 0.3)
    fast, good = methods["chow"]
    assert fast is None and good.point.alpha == 0.5  # never at the verifier's quality
    assert fastest(FOUND, 24.0).point.alpha == 0.9
    assert best(FOUND, 0.35).quality == 24.0


def test_noise_takes_no_lossless_point_out():
    """Lossless outputs follow the verifier's law: a sample of them that scores lower is no worse. Under a
    truncation they follow the truncated verifier's, not the plain one's."""
    points = grid(Settings(), ["speculative", "opt"], [0.0], [5], [1.0], truncations=["top_p"])
    hits = {"verifier": 3, "drafter": 0, "speculative": 2, "opt": 2}
    qualities = {
        p: Quality(
            np.stack([np.arange(4) < hits[p.method] - (p.top_p is not None), np.ones(4)], axis=1),
            {"model_passes": 9},
            0.5,
            9,
        )
        for p in points
    }
    results = compare("exact_match", qualities, {p: Latency(np.ones(4), np.ones(4)) for p in points})
    assert {(r.name, r.point.top_p is None, r.quality, r.expected) for r in results} == {
        ("verifier", True, 75.0, 75.0),
        ("verifier, top_p", False, 50.0, 50.0),
        ("speculative", True, 50.0, 75.0),
        ("speculative, top_p", False, 25.0, 50.0),
        ("drafter", True, 0.0, 0.0),
        ("opt", True, 50.0, 50.0),
    }
    ((_, methods),) = table_two(results).items()
    kept = {name for name, (fast, _) in methods.items() if fast is not None}
    assert kept == {"speculative"}


def test_truncations_are_compared_with_the_plain_verifier():
    """For the verifier and the lossless cascade, a truncation is the lenience of a curve."""
    points = grid(Settings(), ["opt", "speculative"], [0.1], [5], [0.0, 1.0], truncations=["top_p", "min_p"])
    cut = [p for p in points if p.top_p is not None or p.min_p is not None]
    assert all(p.temperature == 1 and p.method in ("verifier", "speculative") for p in cut)
    assert {p.top_p for p in cut if p.method == "verifier"} == {None, *TRUNCATIONS["top_p"].sweep}
    rng = np.random.default_rng(0)
    qualities = {
        p: Quality(np.stack([rng.random(4), np.ones(4)], axis=1), {"model_passes": 9}, 0.5, 9) for p in points
    }
    results = compare("exact_match", qualities, {p: Latency(np.ones(4), np.ones(4)) for p in points})
    assert len(results) == len(points)
    plain = next(p for p in points if p.method == "verifier" and p.temperature == 1 and p not in cut)
    curves = {r.name for r in results}
    assert curves == {
        "verifier",
        "drafter",
        "opt",
        "speculative",
        "verifier, top_p",
        "verifier, min_p",
        "speculative, top_p",
        "speculative, min_p",
    }
    for r in results:
        if r.point in cut:
            assert r.panel == plain and r.lenience in (r.point.top_p, r.point.min_p)
    best_cut = max(r.quality for r in results if r.name == "verifier, top_p")
    _, good = table_two(results)[1.0, None]["verifier, top_p"]
    assert good.quality == best_cut and set(table_two(results)[0.0, None]) == {"opt", "speculative"}


def test_a_truncated_panel_is_also_a_curves_point():
    points = grid(Settings(), ["speculative"], [0.1], [5], [1.0], top_ps=[None, 0.8])
    qualities = {p: Quality(np.ones((4, 2)), {"model_passes": 9}, 0.5, 9) for p in points}
    curve_panels = [(r.name, r.panel.top_p) for r in compare("exact_match", qualities, {})]
    assert curve_panels.count(("speculative", 0.8)) == curve_panels.count(("speculative, top_p", None)) == 1
    assert ("drafter, top_p", None) not in curve_panels
