"""A byte-level drafter for the bundled verifier, trained on the verifier's outputs."""

import dataclasses

from speccascade_jax.config import load
from speccascade_jax.models.t5 import T5Config

DRAFTER = load("demo_drafter")

config = dataclasses.replace(
    DRAFTER,
    name="demo_bytes_drafter",
    output_dir="runs/demo_bytes_drafter",
    shipped=None,
    tokenizer="runs/demo_bytes_tokenizer.model",
    tokenizer_size=260,
    tokenizer_pieces="char",
    task=dataclasses.replace(DRAFTER.task, max_source_length=320, max_target_length=320),
    model=T5Config(
        vocab_size=260,
        d_model=192,
        d_kv=64,
        num_heads=3,
        d_ff=512,
        num_encoder_layers=3,
        num_decoder_layers=2,
        dropout_rate=0.0,
    ),
    teacher_outputs="runs/demo_distilled.jsonl",
    teacher_examples=40_000,
    teacher_singles=False,
    distillation=0.0,
    batch_tokens=6144,
    steps=1500,
    eval_every=500,
)
