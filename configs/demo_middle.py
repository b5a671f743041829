"""A model between the bundled drafter and verifier, for a hierarchy of three. It is trained like the drafter,
but for fewer steps and on texts that are joined once."""

import dataclasses

from speccascade_jax.config import load
from speccascade_jax.models.t5 import T5Config

config = dataclasses.replace(
    load("demo_drafter"),
    name="demo_middle",
    output_dir="runs/demo_middle",
    shipped=None,
    model=T5Config(
        vocab_size=2048,
        d_model=256,
        d_kv=64,
        num_heads=4,
        d_ff=512,
        num_encoder_layers=2,
        num_decoder_layers=3,
        dropout_rate=0.0,
    ),
    teacher_outputs="runs/demo_distilled.jsonl",
    teacher_examples=40_000,
    teacher_singles=False,
    steps=1500,
    validation_examples=0,
)
