"""A decoder-only pair in the Qwen 3 architecture, restaurant facts to a sentence; it has to be trained
first."""

import dataclasses

from speccascade_jax.config import load

config = dataclasses.replace(
    load("e2e_gemma"),
    drafter="runs/e2e_qwen_drafter",
    verifier="runs/e2e_qwen_verifier",
    task="e2e_qwen_verifier",
    missing="Train it with python scripts/finetune.py --config=e2e_qwen_verifier, then e2e_qwen_drafter.",
)
