"""The data-to-text drafter: one narrow decoder layer. It learns the verifier's distributions, on the
data and on its own texts."""

import dataclasses

from speccascade_jax.config import DEMO, load
from speccascade_jax.models.t5 import T5Config

config = dataclasses.replace(
    load("e2e_verifier"),
    name="e2e_drafter",
    output_dir="runs/e2e_drafter",
    shipped="e2e_drafter",
    tokenizer=str(DEMO / "e2e_verifier" / "spiece.model"),
    model=T5Config(
        vocab_size=512,
        d_model=128,
        d_kv=64,
        num_heads=2,
        d_ff=256,
        num_encoder_layers=4,
        num_decoder_layers=1,
        dropout_rate=0.0,
    ),
    teacher=str(DEMO / "e2e_verifier"),
    distillation=0.9,
    on_policy=0.3,
    steps=6000,
    eval_every=1000,
    save_every=1000,
)
