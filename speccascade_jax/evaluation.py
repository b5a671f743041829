"""Quality of decoded texts."""

from collections.abc import Sequence

import sacrebleu


def bleu(hypotheses: Sequence[str], references: Sequence[Sequence[str]], tokenize: str = "13a") -> float:
    """Corpus BLEU (0 to 100) by sacrebleu; each hypothesis has one or more references."""
    streams = max(map(len, references))
    columns = [[r[n] if n < len(r) else "" for r in references] for n in range(streams)]  # "": none
    return sacrebleu.corpus_bleu(list(hypotheses), columns, tokenize=tokenize).score
