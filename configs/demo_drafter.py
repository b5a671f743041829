"""The bundled drafter: the verifier's task and vocabulary, and a decoder of one narrow layer. It is trained
on the verifier's outputs for all training sentences, which are joined again in every epoch, and on the
verifier's distributions."""

import dataclasses

from speccascade_jax.config import DEMO, load
from speccascade_jax.models.t5 import T5Config

config = dataclasses.replace(
    load("demo_verifier"),
    name="demo_drafter",
    output_dir="runs/demo_drafter",
    shipped="drafter",
    tokenizer=str(DEMO / "verifier" / "spiece.model"),
    model=T5Config(
        vocab_size=2048,
        d_model=192,
        d_kv=64,
        num_heads=3,
        d_ff=512,
        num_encoder_layers=4,
        num_decoder_layers=1,
        dropout_rate=0.0,
    ),
    teacher=str(DEMO / "verifier"),
    teacher_outputs="runs/demo_singles.jsonl",
    teacher_singles=True,
    distillation=0.7,
    steps=10_000,
)
