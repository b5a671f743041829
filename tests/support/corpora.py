"""Text to train tiny vocabularies on."""

import numpy as np

SENTENCES = ["the cat sat on the mat", "a dog", "birds sing in the old tree", "why not", "the end"]
PROMPTS = ["the cat sat on the mat", "a dog", "", "birds sing in the old tree and the dog sat", "why not"]
TURN = ["<start_of_turn>", "<end_of_turn>"]


def shuffled(sentences):
    """500 lines of their words, the same in every process (a set's order is not)."""
    words = sorted({word for sentence in sentences for word in sentence.split()})
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(words, 8)) for _ in range(500)]
