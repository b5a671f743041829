"""Quality metrics: their statistics, intervals, and what references they take."""

import numpy as np
import pytest
import sacrebleu

from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation.quality import METRICS, bootstrap, check_references, score, statistics

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


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("hypotheses,references,value", [
    ([], [], []), (["a"], ["abc"], "abc"), (["a"], [None], None), (["a"], [[1]], [1]),
    (["a", "b"], [["a"]], 1), (["a"], [[]], [])])
def test_references_of_another_kind_are_refused(metric, hypotheses, references, value):
    for measure in (METRICS[metric], lambda *texts: statistics(metric, *texts)):
        with pytest.raises(FieldError) as refused:
            measure(hypotheses, references)
        assert (refused.value.field, refused.value.value) == ("references", value)


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_an_entry_says_what_is_so(metric):
    """Its sums' number, its range, and whether an empty reference will do."""
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


def test_what_bleu_cannot_use_is_known_before_anything_is_decoded():
    with pytest.raises(FieldError) as refused:
        check_references("bleu", [["a"], [""]])
    assert (refused.value.field, refused.value.value) == ("references", [""])
    check_references("rouge1", [["a"], [""]])
    with pytest.raises(FieldError) as refused:
        check_references("blue", [["a"]])
    assert (refused.value.field, refused.value.value) == ("metric", "blue")
