"""The quality of decoded texts, and its uncertainty.

METRICS declares each metric once. Configs name a metric; checks, sweeps, tables and pictures use its entry,
so a new metric is one more entry.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import sacrebleu
from jaxtyping import Float

from speccascade_jax.core.errors import FieldError

References = Sequence[Sequence[str]]
Texts = Sequence[str]


@dataclass(frozen=True)
class Metric:
    """A number for a set of texts that is computed from sums over the texts, so that it can be bootstrapped
    and the effect of replacing one text can be computed.

    If a text has several references, the best one counts. Calling a metric gives its value.
    """

    name: str  # the value of a config's task.metric
    label: str  # axis label
    summary: str  # one sentence for help texts
    statistics: Callable[[Texts, References], Float[np.ndarray, "N K"]]  # each text's part of the sums
    score: Callable[[Float[np.ndarray, " K"]], float]  # computes the metric from the sums
    sums: int  # K
    low: float = 0.0
    high: float = 100.0
    words: bool = False  # requires a nonempty reference
    details: Callable[[Texts, References], dict[str, str]] | None = None  # further figures for a report

    def __call__(self, texts: Texts, references: References) -> float:
        """Raises FieldError if the references are not one list of texts for each text."""
        return self.score(statistics(self, texts, references).sum(axis=0))

    def check(self, references: References, texts: int | None = None) -> None:
        """Raises FieldError unless `references` has at least one reference for each text. texts: the number
        of texts; None is not checked."""
        if not references:
            raise FieldError(
                "references", references, "give at least one.", f"{self.name} of no texts is undefined"
            )
        if texts is not None and texts != len(references):
            raise FieldError(
                "references",
                len(references),
                "give one list for each.",
                f"{texts} texts have {len(references)} lists of references",
            )
        for number, group in enumerate(references):
            if (
                isinstance(group, str)
                or not isinstance(group, Sequence)
                or not all(isinstance(reference, str) for reference in group)
            ):
                raise FieldError(
                    "references",
                    group,
                    "give a list of texts.",
                    f"the references of text {number} are {group!r}",
                )
            if not group or (self.words and not any(group)):
                raise FieldError(
                    "references",
                    group,
                    f"{self.name} needs one.",
                    f"text {number} has no reference, or only empty ones",
                )


def metric_of(metric: str | Metric) -> Metric:
    """The metric of that name; a Metric is returned unchanged. Raises FieldError for an unknown name."""
    entry = METRICS.get(metric) if isinstance(metric, str) else metric
    if entry is None:
        raise FieldError("metric", metric, f"known: {', '.join(METRICS)}.", f"unknown metric {metric!r}")
    return entry


def check_references(metric: str | Metric, references: References, texts: int | None = None) -> None:
    """Raises FieldError for an unknown metric, and like Metric.check."""
    metric_of(metric).check(references, texts)


def statistics(metric: str | Metric, texts: Texts, references: References) -> Float[np.ndarray, "N K"]:
    """Each text's contribution to the sums from which `score` computes the metric.

    Raises FieldError if the references are not one list of texts for each text.
    """
    entry = metric_of(metric)
    entry.check(references, len(texts))
    return entry.statistics(texts, references)


def score(metric: str | Metric, total: Float[np.ndarray, " K"]) -> float:
    """The metric of a set of texts, from the sum of their statistics."""
    return metric_of(metric).score(total)


def replaced(
    metric: str | Metric, texts: Texts, references: References, numbers: Sequence[int], others: Texts
) -> Float[np.ndarray, " N"]:
    """For every n, the metric of all texts with text numbers[n] replaced by others[n]. Raises FieldError like
    `statistics`."""
    before = statistics(metric, texts, references)
    if not len(numbers):
        return np.zeros(0)
    after, total = statistics(metric, others, [references[number] for number in numbers]), before.sum(axis=0)
    return np.array(
        [score(metric, total - before[number] + row) for number, row in zip(numbers, after, strict=True)]
    )


# BLEU


def bleu(texts: Texts, references: References, tokenize: str = "13a") -> float:
    """Corpus BLEU (0 to 100) by sacrebleu. Each text has one or more references.

    tokenize="intl" is the BLEU of the T5 papers.
    """
    BLEU.check(references, len(texts))
    return _corpus_bleu(texts, references, tokenize)[0]


def _corpus_bleu(texts: Texts, references: References, tokenize: str) -> tuple[float, str]:
    """BLEU and its sacrebleu signature."""
    streams = max(map(len, references))
    columns: list[Any] = [[r[n] if n < len(r) else None for r in references] for n in range(streams)]
    metric = sacrebleu.BLEU(tokenize=tokenize)
    return metric.corpus_score(list(texts), columns).score, metric.get_signature().format()


def _bleu_statistics(texts: Texts, references: References, tokenize: str) -> Float[np.ndarray, "N 10"]:
    """Counts of matching and of all n-grams (four each), the text's length and that of its closest
    reference."""
    scorer = sacrebleu.BLEU(tokenize=tokenize, effective_order=True)
    scores = [scorer.sentence_score(text, list(r)) for text, r in zip(texts, references, strict=True)]
    return np.array([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores], np.float64)


def _bleu_of_sums(total: Float[np.ndarray, " 10"]) -> float:
    counts = total.astype(int).tolist()
    return sacrebleu.BLEU.compute_bleu(
        counts[:4], counts[4:8], counts[8], counts[9], smooth_method="exp"
    ).score


def _signed(texts: Texts, references: References) -> dict[str, str]:
    """BLEU with both tokenizations, and their sacrebleu signatures."""
    values = {cut: _corpus_bleu(texts, references, cut) for cut in ("13a", "intl")}
    return {f"BLEU {cut}": f"{value:.2f} ({signature})" for cut, (value, signature) in values.items()}


def _bleu(name: str, label: str, tokenize: str, summary: str) -> Metric:
    return Metric(
        name,
        label,
        summary,
        partial(_bleu_statistics, tokenize=tokenize),
        _bleu_of_sums,
        10,
        words=True,
        details=_signed,
    )


# Means over texts


def mean_metric(
    name: str, label: str, summary: str, of_text: Callable[[str, Sequence[str]], float]
) -> Metric:
    """A metric that is the mean over texts of of_text(text, references) in [0, 1], in per cent."""

    def statistics(texts: Texts, references: References) -> Float[np.ndarray, "N 2"]:
        values = [of_text(text, group) for text, group in zip(texts, references, strict=True)]
        return np.stack([np.array(values, np.float64), np.ones(len(values))], axis=1)

    return Metric(name, label, summary, statistics, lambda total: 100.0 * float(total[0] / total[1]), 2)


def _rouge(kind: str) -> Callable[[str, Sequence[str]], float]:
    """The F-measure by rouge-score, without stemming."""

    def of_text(text: str, references: Sequence[str]) -> float:
        return _rouge_scorer(kind).score_multi(list(references), text)[kind].fmeasure

    return of_text


@cache
def _rouge_scorer(kind: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # imported here because it takes a second

    return RougeScorer([kind])


def _equals(text: str, references: Sequence[str]) -> float:
    return float(text.strip() in {reference.strip() for reference in references})


def _sentences(text: str) -> list[str]:
    """The sentences of a text, which end with a full stop and a space, or with the text."""
    return [sentence.strip(" .") for sentence in text.strip().split(". ")]


def _last_equals(text: str, references: Sequence[str]) -> float:
    return float(_sentences(text)[-1] in {_sentences(reference)[-1] for reference in references})


def _steps(text: str, references: Sequence[str]) -> float:
    """The share of a reference's sentences that occur in the text, for the best reference."""
    written = set(_sentences(text))
    return max(float(np.mean([s in written for s in _sentences(reference)])) for reference in references)


BLEU = _bleu("bleu", "BLEU", "13a", "BLEU of all texts together, words cut as at WMT.")
METRICS = {
    metric.name: metric
    for metric in (
        BLEU,
        _bleu("bleu_intl", "BLEU (intl)", "intl", "BLEU with words cut as in the T5 papers."),
        mean_metric("rouge1", "ROUGE-1", "F-measure of single words.", _rouge("rouge1")),
        mean_metric("rouge2", "ROUGE-2", "F-measure of pairs of words.", _rouge("rouge2")),
        mean_metric(
            "rougeLsum",
            "ROUGE-Lsum",
            "F-measure of common subsequences, sentences on lines.",
            _rouge("rougeLsum"),
        ),
        mean_metric("exact_match", "Exact matches (%)", "Texts that equal one of their references.", _equals),
        mean_metric(
            "final_answer",
            "Right answers (%)",
            "Texts whose last sentence is that of one of their references.",
            _last_equals,
        ),
        mean_metric(
            "right_steps", "Right steps (%)", "Sentences of the reference that the text has.", _steps
        ),
    )
}
"""The metrics by name."""


# Uncertainty


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The central 95% interval of bootstrap values."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def resamples(count: int, samples: int = 1000, seed: int = 0) -> np.ndarray:
    """Example indices [samples, count], drawn with replacement. They are the same for every system, so that
    differences are paired (Koehn 2004)."""
    return np.random.default_rng(seed).integers(0, count, (samples, count))


def bootstrap(
    metric: str | Metric, system: Float[np.ndarray, "N K"], baseline: Float[np.ndarray, "N K"] | None = None
) -> tuple[float, float]:
    """The 95% interval of the metric, or of its difference to `baseline` on the same examples."""
    drawn = resamples(len(system))
    values = np.array([score(metric, system[rows].sum(axis=0)) for rows in drawn])
    if baseline is not None:
        values -= [score(metric, baseline[rows].sum(axis=0)) for rows in drawn]
    return interval(values.tolist())
