"""A larger data-to-text verifier on E2E NLG: with ten decoder layers, its step is expensive next to a
drafter's."""

import dataclasses

from speccascade_jax.config import DEMO, load

SMALL = load("e2e_verifier")

config = dataclasses.replace(
    SMALL,
    name="e2e_large_verifier",
    output_dir="runs/e2e_large_verifier",
    shipped=None,
    tokenizer=str(DEMO / "e2e_verifier" / "spiece.model"),
    model=dataclasses.replace(SMALL.model, d_model=256, num_heads=4, d_ff=512, num_decoder_layers=10),
    steps=3500,
    learning_rate=0.01,
    eval_every=500,
    save_every=250,
)
