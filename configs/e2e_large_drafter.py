"""The data-to-text drafter, trained further to match e2e_large_verifier, also on its own texts."""

import dataclasses

from speccascade_jax.config import DEMO, load

config = dataclasses.replace(
    load("e2e_drafter"),
    name="e2e_large_drafter",
    output_dir="runs/e2e_large_drafter",
    shipped=None,
    init=str(DEMO / "e2e_drafter"),
    tokenizer=None,
    teacher="runs/e2e_large_verifier",
    steps=3000,
    learning_rate=0.008,
    eval_every=500,
    save_every=500,
)
