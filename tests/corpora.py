"""Text to train tiny vocabularies on."""

import numpy as np


def shuffled(sentences):
    """500 lines of their words, the same in every process (a set's order is not)."""
    words = sorted({word for sentence in sentences for word in sentence.split()})
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(words, 8)) for _ in range(500)]
