"""Data to text with a verifier that is as costly next to its drafter as large models are (trained here)."""

import dataclasses

from speccascade_jax.config import load

config = dataclasses.replace(
    load("e2e"), drafter="runs/e2e_large_drafter", verifier="runs/e2e_large_verifier", router=None,
    task="e2e_large_verifier",
    missing="Make it with python scripts/finetune.py --config=e2e_large_verifier, then "
            "--config=e2e_large_drafter.")
