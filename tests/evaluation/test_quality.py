"""Quality metrics: their statistics, intervals and valid references."""

import numpy as np
import pytest
import sacrebleu
from made_by_hand import FOUND

from speccascade_jax.commands.evaluate import figures_of
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation import plots
from speccascade_jax.evaluation.quality import (
    METRICS,
    bootstrap,
    check_references,
    mean_metric,
    replaced,
    score,
    statistics,
)
from speccascade_jax.inference.text import Output

HYPOTHESES = ["the cat sat on the mat", "a dog barks", "birds sing", "nothing of it, really"]
TEXTS = [
    ["the cat sat on a mat", "the cat is on the mat"],
    ["a dog barks loudly"],
    ["birds sing in the tree", "birds sing"],
    ["all of it"],
]


@pytest.mark.parametrize("metric", METRICS)
def test_statistics_add_up_to_the_metric(metric):
    assert score(metric, statistics(metric, HYPOTHESES, TEXTS).sum(axis=0)) == pytest.approx(
        METRICS[metric](HYPOTHESES, TEXTS)
    )


def test_bleu_without_a_match_is_smoothed_as_sacrebleu_does():
    for hypotheses in (["a b c d e"], ["x"], [""]):
        sums = statistics("bleu", hypotheses, [["a x b y c"]]).sum(axis=0)
        assert score("bleu", sums) == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [["a x b y c"]]).score)


def test_bootstrap_intervals():
    rng = np.random.default_rng(0)
    hits = (rng.random(400) < 0.3).astype(float)
    better = np.maximum(hits, rng.random(400) < 0.1)
    system, other = (np.stack([x, np.ones(400)], axis=1) for x in (better, hits))
    low, high = bootstrap("exact_match", other)
    spread = 100 * 1.96 * np.sqrt(hits.mean() * (1 - hits.mean()) / 400)
    assert high - low == pytest.approx(2 * spread, rel=0.15)
    low, high = bootstrap("exact_match", system, other)
    assert 0 < low < 100 * (better - hits).mean() < high
    assert high - low < spread * np.sqrt(2)  # paired: half of what independent systems would have
    assert bootstrap("exact_match", system, system) == (0.0, 0.0)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    "hypotheses,references,value",
    [
        ([], [], []),
        (["a"], ["abc"], "abc"),
        (["a"], [None], None),
        (["a"], [[1]], [1]),
        (["a", "b"], [["a"]], 1),
        (["a"], [[]], []),
    ],
)
def test_references_of_another_kind_are_refused(metric, hypotheses, references, value):
    for measure in (METRICS[metric], lambda *texts: statistics(metric, *texts)):
        with pytest.raises(FieldError) as refused:
            measure(hypotheses, references)
        assert (refused.value.field, refused.value.value) == ("references", value)


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_a_metrics_entry_is_correct(metric):
    """Its number of sums, its range, and whether it accepts an empty reference."""
    rows = metric.statistics(HYPOTHESES, TEXTS)
    assert rows.shape == (len(TEXTS), metric.sums) and METRICS[metric.name] is metric
    assert metric(["x y z w"], [["a b c d e"]]) < 10 <= metric.low + 10
    assert metric(HYPOTHESES, [[text] for text in HYPOTHESES]) == pytest.approx(metric.high)
    assert metric.label and metric.summary.endswith(".")
    if metric.words:
        with pytest.raises(FieldError):
            metric(["a"], [[""]])
    else:
        assert metric(["a"], [[""]]) == metric.low


def test_references_that_bleu_cannot_use_are_refused_before_decoding():
    with pytest.raises(FieldError) as refused:
        check_references("bleu", [["a"], [""]])
    assert (refused.value.field, refused.value.value) == ("references", [""])
    check_references("rouge1", [["a"], [""]])
    with pytest.raises(FieldError) as refused:
        check_references("blue", [["a"]])
    assert (refused.value.field, refused.value.value) == ("metric", "blue")


def test_one_more_entry_is_all_that_a_metric_takes(monkeypatch):
    """Checks, statistics, intervals, what one other text changes, a sweep's lines and an axis go by it."""
    shorter = mean_metric(
        "shorter",
        "Shorter texts (%)",
        "Texts shorter than all their references.",
        lambda text, group: float(len(text) < min(map(len, group))),
    )
    monkeypatch.setitem(METRICS, "shorter", shorter)
    check_references("shorter", TEXTS)
    rows = statistics("shorter", HYPOTHESES, TEXTS)
    assert rows.tolist() == [[0, 1], [1, 1], [0, 1], [0, 1]]
    assert score("shorter", rows.sum(axis=0)) == shorter(HYPOTHESES, TEXTS) == 25.0
    assert bootstrap("shorter", rows) == bootstrap(shorter, rows) and bootstrap(shorter, rows)[1] > 25
    assert replaced("shorter", HYPOTHESES, TEXTS, [0], [""])[0] == shorter(["", *HYPOTHESES[1:]], TEXTS)
    [axes] = plots.page(FOUND, "shorter", "latency").axes
    assert axes.get_ylabel() == "Shorter texts (%)"
    figures, _ = figures_of("shorter", [Output(0, "", "a", [], [], {})], [["bc"]], None)
    assert figures["shorter"] == 100.0
