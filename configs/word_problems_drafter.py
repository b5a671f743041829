"""A tenth of word_problems_verifier, in two narrow layers, trained towards its distributions."""

import dataclasses

from speccascade_jax.config import load

VERIFIER = load("word_problems_verifier")

config = dataclasses.replace(
    VERIFIER,
    name="word_problems_drafter",
    output_dir="runs/word_problems_drafter",
    model=dataclasses.replace(
        VERIFIER.model, d_model=64, d_ff=192, num_heads=4, num_kv_heads=4, num_layers=2
    ),
    teacher="runs/word_problems_verifier",
    distillation=0.7,
    steps=4000,
)
