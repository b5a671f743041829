"""A drafter that reads the shipped verifier's encoder, trained on what the verifier writes and towards the
distributions it writes it from; the verifier stays as it is.

Decode it as runs/demo_shared_drafter@drafter and runs/demo_shared_drafter.
"""

import dataclasses

from speccascade_jax.config import DEMO, ExitTraining, load
from speccascade_jax.models import SharedEncoderConfig
from speccascade_jax.models.t5 import T5Config

VERIFIER = load("demo_verifier")

config = dataclasses.replace(
    VERIFIER, name="demo_shared_drafter", output_dir="runs/demo_shared_drafter", export_dir=None,
    init=str(DEMO / "verifier"), tokenizer=None,
    model=SharedEncoderConfig(
        VERIFIER.model, T5Config(vocab_size=2048, d_model=192, d_kv=64, num_heads=3, d_ff=512,
                                 num_encoder_layers=0, num_decoder_layers=1, dropout_rate=0.0)),
    exits=ExitTraining(frozen=True), distillation=0.7, teacher=str(DEMO / "verifier"),
    teacher_outputs="runs/demo_distilled.jsonl", teacher_examples=40_000, steps=5000, validation_examples=0)
