"""A drafter that writes a whole draft in one pass: it reads the bundled verifier's states after three of its
layers and its encoder, and learns from the verifier's outputs and distributions. The verifier is frozen.
"""

import dataclasses

from speccascade_jax.config import DEMO, ExitTraining, load
from speccascade_jax.models import BlockDrafterConfig

VERIFIER = load("demo_verifier")

config = dataclasses.replace(
    VERIFIER,
    name="demo_block_drafter",
    output_dir="runs/demo_block_drafter",
    shipped=None,
    init=str(DEMO / "verifier"),
    tokenizer=None,
    model=BlockDrafterConfig(
        dataclasses.replace(VERIFIER.model, dropout_rate=0.0),
        states=(1, 3, 5),
        block_size=16,
        num_layers=2,
        num_heads=8,
        d_kv=64,
        d_ff=512,
    ),
    exits=ExitTraining(frozen=True),
    distillation=1.0,
    divergence="kl_to_lk",
    teacher=str(DEMO / "verifier"),
    teacher_outputs="runs/demo_distilled_all.jsonl",
    steps=6000,
    learning_rate=0.005,
    validation_examples=0,
)
