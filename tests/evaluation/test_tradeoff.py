"""Sweeps, their reductions and pictures, on the toys; scripts/tradeoff.py on a tiny pair."""

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pytest
import sacrebleu
from matplotlib.image import imread
from toys import pair

from speccascade_jax.core.metrics import relative_cost
from speccascade_jax.evaluation import plots as figures
from speccascade_jax.evaluation import sweep as tradeoff
from speccascade_jax.evaluation.quality import METRICS, bootstrap, score, statistics
from speccascade_jax.evaluation.sweep import Latency, OneShape, Point, Quality, Result
from speccascade_jax.inference.text import Cascade

SOURCES = ["1", "12", "2", "21", "0", "1", "20", "10"] * 3
REFERENCES = [[text[::-1], "1 2 3"] for text in SOURCES]
EIGHT = ["token_v3", "opt", "diff", "chow", "lossy", "bild_star", "token_cascade", "sequence"]


def one_shape() -> OneShape:
    return OneShape(**{f.name: getattr(pair(), f.name) for f in dataclasses.fields(Cascade)})


def measure(cascade, points, path, **settings):
    return tradeoff.measure_quality(cascade, points, SOURCES, REFERENCES, "exact_match", path, settings,
                                    shared={"seed": 0}, batch_size=8, track=lambda items, name: iter(items))


def time(cascade, points, path, trials=2, track=lambda items, name: iter(items)):
    return tradeoff.measure_latency(cascade, points, SOURCES[:3], path, {}, shared={"seed": 0}, trials=trials,
                                    track=track)


def test_no_point_is_always_timed_after_the_same_one(tmp_path):
    """A program is faster after itself than after another: neighbours must change."""
    calls = []

    class Spy(OneShape):
        def generate(self, texts, **options):
            calls.append((options["method"], options["alpha"]))
            return super().generate(texts, **options)

    cascade = Spy(**{f.name: getattr(pair(), f.name) for f in dataclasses.fields(Cascade)})
    points = tradeoff.grid(["token_v3"], [0.1, 0.3, 0.5], [2], [0.0])
    time(cascade, points, tmp_path / "latency.jsonl")
    size = len(points)
    rounds = [calls[-size * n:][:size] for n in range(6, 0, -1)]
    assert all(sorted(r) == sorted((p.method, p.alpha) for p in points) for r in rounds)
    assert len({two for r in rounds for two in pairwise(r)}) > size  # a rotation has no more


def test_a_sweep_compiles_once_a_method_and_gamma(tmp_path):
    """8 methods x 11 alphas x 2 gammas x 2 temperatures, and the models alone."""
    points = tradeoff.grid(EIGHT, [n / 10 for n in range(11)], [2, 3], [0.0, 1.0])
    assert len(points) == len(set(points)) == 2 * (2 + (6 * 2 + 2) * 11)
    cascade = one_shape()
    found = measure(cascade, points, tmp_path / "quality.jsonl")
    assert set(found) == set(points)
    # Twelve with a gamma, two baselines; the models alone are one program here, for the toys are alike, and
    # it is the sequence cascade's second. Each: begin (a batch; rows that refill), run, refill, finish.
    assert cascade.clock.compilations == (12 + 2 + 1) * 5


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


def test_a_killed_sweep_goes_on(tmp_path):
    points = tradeoff.grid(["token_v3", "sequence"], [0.2, 0.7], [2], [1.0])
    cascade = one_shape()
    whole = measure(cascade, points, tmp_path / "whole.jsonl")
    path = tmp_path / "quality.jsonl"
    path.write_bytes((tmp_path / "whole.jsonl").read_bytes()[:-25])  # cut inside its last line
    (tmp_path / "quality.jsonl.settings.json").write_text("{}")
    again = measure(cascade, points, path)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    for point in points:
        np.testing.assert_array_equal(again[point].statistics, whole[point].statistics)
    with pytest.raises(ValueError, match="other settings"):
        measure(cascade, points, path, seed=1)

    with pytest.raises(Killed):
        time(cascade, points, tmp_path / "latency.jsonl", track=stopping(4))
    timed = time(cascade, points, tmp_path / "latency.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "latency.jsonl").read_text().splitlines()]
    done = [(line["trial"], line["example"]) for line in lines]
    assert done == [(t, n) for t in range(2) for n in range(3)]
    for k, point in enumerate(points):
        np.testing.assert_allclose(timed[point].seconds, [
            sum(line["seconds"][k] for line in lines if line["example"] == n) for n in range(3)])


def test_results_say_what_was_measured(tmp_path):
    """Rates, calls and predictions from counts made by hand; latency from seconds made by hand."""
    def quality(hits, counts, tokens, acceptance=0.0):
        rows = np.stack([np.array(hits, float), np.ones(len(hits))], axis=1)
        return Quality(rows, counts, acceptance, tokens)

    point = Point("token_v3", 0.2, 5, 0.0)
    cascade = Point("token_cascade", 0.2, 0, 0.0)
    verifier, drafter = point.alone("verifier"), point.alone("drafter")
    qualities = {
        verifier: quality([1, 1, 0, 0], {"model_passes": 100}, 100),
        drafter: quality([1, 0, 0, 0], {"model_passes": 80}, 80),
        point: quality([1, 1, 1, 0], {"drafted": 100, "accepted": 75, "deferred": 50, "rounds": 20,
                                      "emitted": 95, "drafter_passes": 120}, 95, acceptance=0.8),
        cascade: quality([1, 1, 0, 0], {"drafted": 60, "accepted": 60, "deferred": 30, "rounds": 40,
                                        "emitted": 100, "drafter_passes": 100}, 100)}
    seconds = {verifier: (10.0, 100), drafter: (1.0, 100), point: (5.0, 50), cascade: (8.0, 100)}
    latencies = {p: Latency(np.full(4, s / 4), np.full(4, n / 4)) for p, (s, n) in seconds.items()}
    found = {r.point: r for r in tradeoff.results("exact_match", qualities, latencies)}
    r = found[point]
    assert (r.quality, r.latency, r.deferral_rate, r.rejection_rate) == (75.0, 0.5, 0.5, 0.25)
    assert r.calls_per_token == 20 / 95 and r.latency_interval == (0.5, 0.5)
    assert r.predicted == pytest.approx(relative_cost(0.8, 5, 0.1) * 50 / 100)
    assert found[cascade].predicted == pytest.approx((100 * 0.1 + 40) / 100)
    assert found[verifier].gain == (0.0, 0.0) and found[verifier].latency == 1.0
    assert found[verifier].predicted == 1.0 and found[drafter].predicted == pytest.approx(0.1)


def result(method, alpha, quality, latency, gamma=5, temperature=1.0):
    return Result(Point(method, alpha, gamma, temperature), quality, (quality - 32, quality - 28), 0.3, 0.2,
                  0.4, latency, (latency - 0.05, latency + 0.05), latency)


FOUND = [result("verifier", 0.0, 30.0, 1.0, 0), result("drafter", 0.0, 20.0, 0.1, 0),
         result("opt", 0.0, 30.0, 0.9), result("opt", 0.3, 31.0, 0.6), result("opt", 0.9, 24.0, 0.3),
         result("opt", 1.0, 33.0, 1.1), result("chow", 0.5, 29.0, 0.8), result("chow", 0.9, 22.0, 0.4)]


def test_table_two():
    (key, methods), = tradeoff.table_two(FOUND).items()
    assert key == (1.0, None) and list(methods) == ["opt", "chow"]
    fast, good = methods["opt"]
    assert (fast.point.alpha, good.point.alpha) == (0.3, 0.3)
    fast, good = methods["chow"]
    assert fast is None and good.point.alpha == 0.5  # never at the verifier's quality
    assert tradeoff.fastest(FOUND, 24.0).point.alpha == 0.9
    assert tradeoff.best(FOUND, 0.35).quality == 24.0


def test_pictures(tmp_path):
    """Opaque, with a curve for every method: something is drawn in each one's colour."""
    more = [dataclasses.replace(r, point=dataclasses.replace(r.point, gamma=g and 3)) for r in FOUND
            if (g := r.point.gamma)]
    written = figures.draw([*FOUND, *more], "bleu", tmp_path)
    assert [p.name for p in written] == ["quality_latency.png", "quality_rejected.png",
                                         "quality_deferred.png", "quality_calls.png"]
    for path in written:
        pixels = imread(path)
        assert pixels.shape[2] == 3 or (pixels[..., 3] == 1).all()
        for colour in (figures.COLOURS[tradeoff.COMPARED.index(name)] for name in ("opt", "chow")):
            rgb = [int(colour[n:n + 2], 16) / 255 for n in (1, 3, 5)]
            assert (np.abs(pixels[..., :3] - rgb).max(axis=-1) < 0.02).sum() > 50
    untimed = [dataclasses.replace(r, latency=None) for r in FOUND]
    assert figures.draw(untimed, "bleu", tmp_path) == written[1:]


def test_a_method_looks_the_same_in_every_picture():
    def looks(*names):
        return figures._styles([result(name, 0.1, 30.0, 0.5) for name in names])

    many = looks("token_v1", "sequence", "token_v2", *(name for name in tradeoff.COMPARED if name != "opt"))
    assert all(looks("lossy_tuned", name)[name] == many[name] for name in tradeoff.COMPARED if name != "opt")
    assert len({look["color"] for look in many.values()}) == len(figures.COLOURS) == len(many)


HYPOTHESES = ["the cat sat on the mat", "a dog barks", "birds sing", "nothing of it, really"]
TEXTS = [["the cat sat on a mat", "the cat is on the mat"], ["a dog barks loudly"],
         ["birds sing in the tree", "birds sing"], ["all of it"]]


@pytest.mark.parametrize("metric", METRICS)
def test_statistics_add_up_to_the_metric(metric):
    assert score(metric, statistics(metric, HYPOTHESES, TEXTS).sum(axis=0)) == pytest.approx(
        METRICS[metric](HYPOTHESES, TEXTS))


def test_bleu_without_a_match_is_smoothed_as_sacrebleu_does():
    for hypotheses in (["a b c d e"], ["x"], [""]):
        own = statistics("bleu", hypotheses, [["a x b y c"]]).sum(axis=0)
        assert score("bleu", own) == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [["a x b y c"]]).score)


def test_bootstrap_intervals():
    rng = np.random.default_rng(0)
    hits = (rng.random(400) < 0.3).astype(float)
    better = np.maximum(hits, rng.random(400) < 0.1)
    own, other = (np.stack([x, np.ones(400)], axis=1) for x in (better, hits))
    low, high = bootstrap("exact_match", other)
    spread = 100 * 1.96 * np.sqrt(hits.mean() * (1 - hits.mean()) / 400)
    assert high - low == pytest.approx(2 * spread, rel=0.15)
    low, high = bootstrap("exact_match", own, other)
    assert 0 < low < 100 * (better - hits).mean() < high
    assert high - low < spread * np.sqrt(2)  # paired: half of what independent systems would have
    assert bootstrap("exact_match", own, own) == (0.0, 0.0)
