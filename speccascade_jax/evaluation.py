"""Quality of decoded texts."""

import functools
from collections.abc import Callable, Sequence

import sacrebleu

References = Sequence[Sequence[str]]


def bleu(hypotheses: Sequence[str], references: References, tokenize: str = "13a") -> float:
    """Corpus BLEU (0 to 100) by sacrebleu; each hypothesis has one or more references."""
    streams = max(map(len, references))
    columns = [[r[n] if n < len(r) else "" for r in references] for n in range(streams)]  # "": none
    return sacrebleu.corpus_bleu(list(hypotheses), columns, tokenize=tokenize).score


def rouge(hypotheses: Sequence[str], references: References, kind: str) -> float:
    """Mean ROUGE F-measure (0 to 100) by rouge-score, without stemming; of several references the
    best one counts. `kind`: rouge1, rouge2 or rougeLsum (sentences on lines)."""
    from rouge_score.rouge_scorer import RougeScorer
    scorer = RougeScorer([kind])
    scores = [scorer.score_multi(list(r), h)[kind].fmeasure
              for h, r in zip(hypotheses, references, strict=True)]
    return 100.0 * sum(scores) / len(scores)


METRICS: dict[str, Callable[[Sequence[str], References], float]] = {
    "bleu": bleu, **{kind: functools.partial(rouge, kind=kind) for kind in ("rouge1", "rouge2", "rougeLsum")}}
