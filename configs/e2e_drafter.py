"""The shipped data-to-text drafter: one narrow decoder layer, towards the verifier's distributions."""

import dataclasses

from speccascade_jax.config import REPOSITORY, load
from speccascade_jax.models.t5 import T5Config

E2E = REPOSITORY / "speccascade_jax" / "demo" / "e2e"

config = dataclasses.replace(
    load("e2e_verifier"), name="e2e_drafter", output_dir="runs/e2e_drafter",
    export_dir=str(E2E / "drafter"), tokenizer=str(E2E / "verifier" / "spiece.model"),
    model=T5Config(vocab_size=512, d_model=128, d_kv=64, num_heads=2, d_ff=256,
                   num_encoder_layers=1, num_decoder_layers=1, dropout_rate=0.0),
    teacher=str(E2E / "verifier"), distillation=0.7, steps=600)
