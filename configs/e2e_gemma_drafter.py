"""A tenth of e2e_gemma_verifier, trained to match its distributions."""

import dataclasses

from speccascade_jax.config import load
from speccascade_jax.models.presets import GEMMA2

config = dataclasses.replace(
    load("e2e_gemma_verifier"),
    name="e2e_gemma_drafter",
    output_dir="runs/e2e_gemma_drafter",
    shipped="e2e_gemma_drafter",
    model=dataclasses.replace(
        GEMMA2,
        vocab_size=1024,
        d_model=96,
        d_kv=32,
        d_ff=256,
        num_heads=3,
        num_kv_heads=1,
        num_layers=2,
        window=32,
        query_scalar=32,
    ),
    teacher="runs/e2e_gemma_verifier",
    distillation=0.7,
    label_smoothing=0.0,
    steps=800,
)
