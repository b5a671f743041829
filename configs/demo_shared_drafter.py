"""A drafter that reads the bundled verifier's encoder and its states. It starts as a slice of the verifier,
and learns from its distributions on its outputs for all training sentences, which are joined again in every
epoch. The verifier is frozen. The bundled drafter (config demo_shared) contains no copy of it.
"""

import dataclasses

from speccascade_jax.config import DEMO, ExitTraining, load
from speccascade_jax.models import SharedEncoderConfig
from speccascade_jax.models.t5 import T5Config

VERIFIER = load("demo_verifier")

config = dataclasses.replace(
    VERIFIER,
    name="demo_shared_drafter",
    output_dir="runs/demo_shared_drafter",
    shipped="shared_drafter",
    init=str(DEMO / "verifier"),
    tokenizer=None,
    model=SharedEncoderConfig(
        VERIFIER.model,
        T5Config(
            vocab_size=2048,
            d_model=192,
            d_kv=64,
            num_heads=3,
            d_ff=512,
            num_encoder_layers=0,
            num_decoder_layers=1,
            dropout_rate=0.0,
        ),
        states=True,
    ),
    exits=ExitTraining(frozen=True),
    distillation=1.0,
    divergence="kl_to_lk",
    teacher=str(DEMO / "verifier"),
    teacher_outputs="runs/demo_singles.jsonl",
    teacher_singles=True,
    steps=5000,
    optimizer="muon",
    learning_rate=0.015,
    validation_examples=0,
)
