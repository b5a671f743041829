"""A decoder-only drafter with another vocabulary for e2e_gemma_verifier: 512 pieces of another kind, trained
on the verifier's outputs."""

import dataclasses

from speccascade_jax.config import DEMO, load
from speccascade_jax.models.presets import GEMMA2

DRAFTER = load("e2e_gemma_drafter")

config = dataclasses.replace(
    DRAFTER,
    name="e2e_gemma_foreign_drafter",
    output_dir="runs/e2e_gemma_foreign_drafter",
    shipped="e2e_gemma_foreign_drafter",
    tokenizer="runs/e2e_gemma_foreign_tokenizer.model",
    tokenizer_size=512,
    tokenizer_pieces="bpe",
    task=dataclasses.replace(DRAFTER.task, max_source_length=72, max_target_length=96),
    model=dataclasses.replace(
        GEMMA2,
        vocab_size=512,
        d_model=96,
        d_kv=32,
        d_ff=256,
        num_heads=3,
        num_kv_heads=1,
        num_layers=2,
        window=32,
        query_scalar=32,
    ),
    teacher=str(DEMO / "e2e_gemma_verifier"),
    teacher_outputs="runs/e2e_gemma_distilled.jsonl",
    distillation=0.0,
    steps=1600,
)
