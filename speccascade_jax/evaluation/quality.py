"""Quality of decoded texts, and how sure it is."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import sacrebleu
from jaxtyping import Float

References = Sequence[Sequence[str]]
TOKENIZERS = {"bleu": "13a", "bleu_intl": "intl"}
ROUGES = ("rouge1", "rouge2", "rougeLsum")


def check_references(metric: str, references: References, texts: int | None = None) -> None:
    """Raises ValueError for an unknown metric, and where `references` are not what it needs: for each of
    `texts` texts (any number where it is None) one reference or more."""
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; known: {', '.join(METRICS)}.")
    if not references:
        raise ValueError(f"{metric} of no texts is undefined: give at least one.")
    if texts is not None and texts != len(references):
        raise ValueError(f"{texts} texts have {len(references)} lists of references: give one list for each.")
    for number, own in enumerate(references):
        if isinstance(own, str) or not isinstance(own, Sequence) or not all(isinstance(r, str) for r in own):
            raise ValueError(f"the references of text {number} are {own!r}; give a list of texts.")
        if not own or (metric in TOKENIZERS and not any(own)):
            raise ValueError(f"text {number} has no reference, or only empty ones: {metric} needs one.")


def bleu(hypotheses: Sequence[str], references: References, tokenize: str = "13a") -> float:
    """Corpus BLEU (0 to 100) by sacrebleu; each hypothesis has one or more references.

    tokenize="intl" is the BLEU of the T5 papers.
    """
    return bleu_and_signature(hypotheses, references, tokenize)[0]


def bleu_and_signature(hypotheses: Sequence[str], references: References, tokenize: str) -> tuple[float, str]:
    """BLEU, and sacrebleu's signature of how it was computed."""
    check_references("bleu", references, len(hypotheses))
    streams = max(map(len, references))
    columns: list[Any] = [[r[n] if n < len(r) else None for r in references] for n in range(streams)]
    metric = sacrebleu.BLEU(tokenize=tokenize)
    return metric.corpus_score(list(hypotheses), columns).score, metric.get_signature().format()


def statistics(metric: str, hypotheses: Sequence[str], references: References) -> Float[np.ndarray, "N K"]:
    """What each text adds to the sums that `score` turns into the metric.

    BLEU: matching and all n-grams (four each), the text's length and its closest reference's. Otherwise the
    text's own score and 1: ROUGE F-measure by rouge-score without stemming (rougeLsum: sentences on lines),
    or whether it is one of its references (exact_match). Of several references the best one counts.

    Raises ValueError where the references are not one list of texts for each text.
    """
    check_references(metric, references, len(hypotheses))
    if metric in TOKENIZERS:
        scorer = sacrebleu.BLEU(tokenize=TOKENIZERS[metric], effective_order=True)
        scores = [scorer.sentence_score(h, list(r)) for h, r in zip(hypotheses, references, strict=True)]
        return np.array([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores], np.float64)
    if metric == "exact_match":
        own = [h.strip() in {one.strip() for one in r} for h, r in zip(hypotheses, references, strict=True)]
    else:
        from rouge_score.rouge_scorer import RougeScorer
        scorer = RougeScorer([metric])
        own = [scorer.score_multi(list(r), h)[metric].fmeasure
               for h, r in zip(hypotheses, references, strict=True)]
    return np.stack([np.array(own, np.float64), np.ones(len(own))], axis=1)


def replaced(metric: str, texts: Sequence[str], references: References, numbers: Sequence[int],
             others: Sequence[str]) -> Float[np.ndarray, " N"]:
    """The metric of all texts with others[n] in place of text numbers[n], for every n. Raises ValueError as
    `statistics` does."""
    own = statistics(metric, texts, references)
    if not len(numbers):
        return np.zeros(0)
    new, total = statistics(metric, others, [references[number] for number in numbers]), own.sum(axis=0)
    return np.array([score(metric, total - own[number] + one)
                     for number, one in zip(numbers, new, strict=True)])


def sums(metric: str) -> int:
    """K: how many numbers `statistics` gives for each text."""
    return 10 if metric in TOKENIZERS else 2


def score(metric: str, total: Float[np.ndarray, " K"]) -> float:
    """The metric (0 to 100) of a set of texts, from the sum of their statistics."""
    if metric in TOKENIZERS:
        counts = total.astype(int).tolist()
        return sacrebleu.BLEU.compute_bleu(counts[:4], counts[4:8], counts[8], counts[9],
                                           smooth_method="exp").score
    return 100.0 * float(total[0] / total[1])


def _measure(metric: str, hypotheses: Sequence[str], references: References) -> float:
    return score(metric, statistics(metric, hypotheses, references).sum(axis=0))


METRICS: dict[str, Callable[[Sequence[str], References], float]] = {
    "bleu": bleu, "bleu_intl": partial(bleu, tokenize="intl"),
    **{kind: partial(_measure, kind) for kind in (*ROUGES, "exact_match")}}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The middle 95% of bootstrap values."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def resamples(count: int, samples: int = 1000, seed: int = 0) -> np.ndarray:
    """Example numbers [samples, count], drawn with replacement: the same for every system, so that
    differences are paired (Koehn 2004)."""
    return np.random.default_rng(seed).integers(0, count, (samples, count))


def bootstrap(metric: str, own: Float[np.ndarray, "N K"], baseline: Float[np.ndarray, "N K"] | None = None
              ) -> tuple[float, float]:
    """The 95% interval of the metric, or of its difference to `baseline` on the same examples."""
    drawn = resamples(len(own))
    values = np.array([score(metric, own[rows].sum(axis=0)) for rows in drawn])
    if baseline is not None:
        values -= [score(metric, baseline[rows].sum(axis=0)) for rows in drawn]
    return interval(values.tolist())
