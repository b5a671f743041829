"""A tenth of e2e_qwen_verifier, trained to match its distributions."""

import dataclasses

from speccascade_jax.config import load

VERIFIER = load("e2e_qwen_verifier")

config = dataclasses.replace(
    VERIFIER,
    name="e2e_qwen_drafter",
    output_dir="runs/e2e_qwen_drafter",
    model=dataclasses.replace(
        VERIFIER.model, d_model=96, d_ff=256, num_heads=3, num_kv_heads=1, num_layers=2
    ),
    teacher="runs/e2e_qwen_verifier",
    distillation=0.7,
    label_smoothing=0.0,
    steps=800,
)
