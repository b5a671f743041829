"""The demo's drafter fine-tuned on what the Multi30k verifier writes."""

import dataclasses

from speccascade_jax.config import REPOSITORY, load

config = dataclasses.replace(
    load("multi30k_verifier"), name="multi30k_drafter", output_dir="runs/multi30k_drafter",
    model=load("demo_drafter").model, init=str(REPOSITORY / "speccascade_jax" / "demo" / "drafter"),
    teacher="runs/multi30k_verifier", teacher_outputs="runs/multi30k_distilled.jsonl", distillation=0.7,
    learning_rate=0.01, steps=2000)
