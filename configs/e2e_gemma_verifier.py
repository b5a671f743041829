"""A small Gemma on E2E NLG (restaurant facts to a sentence), a prompt and its continuation, from scratch."""

import dataclasses

from speccascade_jax.config import DATA, Task, TrainConfig
from speccascade_jax.models.presets import GEMMA2

task = Task(
    train=f"{DATA}/e2e_nlg/train.jsonl.gz",
    validation=f"{DATA}/e2e_nlg/validation.jsonl.gz",
    test=f"{DATA}/e2e_nlg/test.jsonl.gz",
    suffix=" =",
    metric="rouge2",
    max_source_length=56,
    max_target_length=56,
)

config = TrainConfig(
    name="e2e_gemma_verifier",
    output_dir="runs/e2e_gemma_verifier",
    shipped="e2e_gemma_verifier",
    task=task,
    tokenizer="runs/e2e_gemma_tokenizer.model",
    tokenizer_size=1024,
    model=dataclasses.replace(
        GEMMA2,
        vocab_size=1024,
        d_model=256,
        d_kv=32,
        d_ff=640,
        num_heads=8,
        num_kv_heads=4,
        num_layers=4,
        window=32,
        query_scalar=32,
    ),
    steps=800,
    batch_tokens=2048,
    optimizer="adamw",
    learning_rate=0.015,
    warmup_steps=80,
    decay="linear",
    clip_norm=1.0,
    label_smoothing=0.1,
    validation_examples=128,
    eval_every=200,
    save_every=100,
    log_every=20,
)
