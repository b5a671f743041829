"""A decoder-only model in the Qwen 3 architecture that solves word problems step by step, from scratch."""

import dataclasses

from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.models.presets import QWEN3

MADE = "made://word_problems?split={}&operations={}&distractors=0-2&order=forward&examples={}"

task = Task(
    train=MADE.format("train", "1-8", 200_000),
    validation=MADE.format("validation", "2-8", 256),
    test=MADE.format("test", "4-8", 2000),
    suffix=" =",
    metric="final_answer",
    max_source_length=160,
    max_target_length=112,
)

config = TrainConfig(
    name="word_problems_verifier",
    output_dir="runs/word_problems_verifier",
    shipped="word_problems_verifier",
    task=task,
    tokenizer="runs/word_problems_tokenizer.model",
    tokenizer_size=384,
    tokenizer_pieces="word",
    model=dataclasses.replace(
        QWEN3,
        vocab_size=384,
        d_model=128,
        d_kv=16,
        d_ff=384,
        num_heads=8,
        num_kv_heads=8,
        num_layers=6,
        tied_embeddings=True,
        max_positions=2048,
        pad_id=0,
        eos_id=1,
        bos_id=2,
    ),
    steps=12_000,
    batch_tokens=2048,
    optimizer="muon",
    learning_rate=0.04,
    warmup_steps=100,
    decay="linear",
    clip_norm=1.0,
    validation_examples=128,
    eval_every=500,
    save_every=100,
    log_every=50,
)
