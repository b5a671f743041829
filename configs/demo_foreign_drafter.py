"""A drafter for the bundled verifier with a vocabulary of its own, 1024 pieces. It learns from the verifier's
outputs for all training sentences, joined again in every epoch and split into the verifier's tokens. (It
cannot learn the verifier's distributions, which are over a different vocabulary.)"""

import dataclasses

from speccascade_jax.config import load
from speccascade_jax.models.t5 import T5Config

config = dataclasses.replace(
    load("demo_drafter"),
    name="demo_foreign_drafter",
    output_dir="runs/demo_foreign_drafter",
    shipped="foreign_drafter",
    tokenizer="runs/demo_foreign_tokenizer.model",
    tokenizer_size=1024,
    model=T5Config(
        vocab_size=1024,
        d_model=192,
        d_kv=64,
        num_heads=3,
        d_ff=512,
        num_encoder_layers=4,
        num_decoder_layers=1,
        dropout_rate=0.0,
    ),
    distillation=0.0,
    teacher_tokens=True,
    steps=8000,
)
