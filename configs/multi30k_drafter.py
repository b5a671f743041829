"""The demo drafter, fine-tuned on the outputs and distributions of the Multi30k verifier."""

import dataclasses

from speccascade_jax.config import DEMO, load

config = dataclasses.replace(
    load("multi30k_verifier"),
    name="multi30k_drafter",
    output_dir="runs/multi30k_drafter",
    model=load("demo_drafter").model,
    init=str(DEMO / "drafter"),
    teacher="runs/multi30k_verifier",
    teacher_outputs="runs/multi30k_outputs.jsonl",
    distillation=0.7,
    label_smoothing=0.0,
    learning_rate=0.01,
    steps=1500,
)
