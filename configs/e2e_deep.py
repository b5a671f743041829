"""A deep data-to-text model with early exits (LayerSkip), on E2E NLG from scratch: sixteen decoder layers,
with exits after 1, 2, 4 and 8 layers that share its head.

Decode it as runs/e2e_deep@2 and runs/e2e_deep.
"""

import dataclasses

from speccascade_jax.config import ExitTraining, load
from speccascade_jax.models import ExitsConfig
from speccascade_jax.models.t5 import T5Config

config = dataclasses.replace(
    load("e2e_verifier"),
    name="e2e_deep",
    output_dir="runs/e2e_deep",
    shipped=None,
    model=ExitsConfig(
        T5Config(
            vocab_size=512,
            d_model=320,
            d_kv=64,
            num_heads=5,
            d_ff=640,
            num_encoder_layers=2,
            num_decoder_layers=16,
            dropout_rate=0.1,
        ),
        layers=(1, 2, 4, 8),
    ),
    exits=ExitTraining(frozen=False, layer_dropout=0.1, exit_weight=0.25),
    distillation=0.0,
    steps=1200,
    learning_rate=0.01,
    warmup_steps=100,
    eval_every=300,
    save_every=100,
    validation_examples=0,
)
