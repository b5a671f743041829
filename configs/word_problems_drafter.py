"""A tenth of word_problems_verifier, in two narrow layers, trained to match its distributions."""

import dataclasses

from speccascade_jax.config import DEMO, load

VERIFIER = load("word_problems_verifier")

config = dataclasses.replace(
    VERIFIER,
    name="word_problems_drafter",
    output_dir="runs/word_problems_drafter",
    shipped="word_problems_drafter",
    tokenizer=str(DEMO / "word_problems_verifier" / "spiece.model"),
    model=dataclasses.replace(
        VERIFIER.model, d_model=64, d_ff=192, num_heads=4, num_kv_heads=4, num_layers=2
    ),
    teacher=str(DEMO / "word_problems_verifier"),
    distillation=0.8,
    learning_rate=0.05,
    batch_tokens=4096,
    warmup_steps=50,
    steps=2000,
    seed=4,
)
