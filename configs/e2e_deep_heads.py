"""Exits fitted afterwards to e2e_deep_plain, which is frozen.

Each has a norm and an adapter before the full model's head.
"""

import dataclasses

from speccascade_jax.config import ExitTraining, load

DEEP = load("e2e_deep")

config = dataclasses.replace(
    DEEP,
    name="e2e_deep_heads",
    output_dir="runs/e2e_deep_heads",
    init="runs/e2e_deep_plain",
    tokenizer=None,
    model=dataclasses.replace(DEEP.model, layers=(2, 4, 8, 12), head="adapter", rank=64),
    exits=ExitTraining(frozen=True),
    distillation=1.0,
    warmup_steps=50,
    steps=400,
)
