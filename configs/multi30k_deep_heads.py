"""Exits fitted afterwards to multi30k_deep_plain, which is frozen.

Each has a norm and an adapter before the full model's head.
"""

import dataclasses

from speccascade_jax.config import ExitTraining, load

DEEP = load("multi30k_deep")

config = dataclasses.replace(
    DEEP,
    name="multi30k_deep_heads",
    output_dir="runs/multi30k_deep_heads",
    init="runs/multi30k_deep_plain",
    tokenizer=None,
    model=dataclasses.replace(DEEP.model, layers=(4, 8, 12), head="adapter", rank=64),
    exits=ExitTraining(frozen=True),
    distillation=1.0,
    learning_rate=0.01,
    warmup_steps=50,
    steps=1000,
    validation_examples=0,
)
