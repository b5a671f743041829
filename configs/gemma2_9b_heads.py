"""Exits fitted to Gemma 2 9B, which is frozen: after 7, 14 and 28 of its 42 layers, each with a norm and an
adapter before the full model's head. In bfloat16 on eight chips of 16 GB.
"""

import dataclasses

from speccascade_jax.config import ExitTraining, load
from speccascade_jax.models import ExitsConfig
from speccascade_jax.models.presets import PRESETS

config = dataclasses.replace(
    load("e2e_gemma_verifier"),
    name="gemma2_9b_heads",
    output_dir="runs/gemma2_9b_heads",
    shipped=None,
    init="hf://google/gemma-2-9b",
    tokenizer=None,
    model=ExitsConfig(PRESETS["gemma2_9b"], layers=(7, 14, 28), head="adapter", rank=256),
    exits=ExitTraining(frozen=True),
    distillation=1.0,
    label_smoothing=0.0,
    steps=5000,
    learning_rate=0.005,
    warmup_steps=200,
    optimizer="adafactor",
    split_parameters=True,
    remat=True,
    validation_examples=0,
)
