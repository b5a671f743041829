"""The decoder-only data-to-text verifier and a drafter with another vocabulary."""

import dataclasses

from speccascade_jax.config import DEMO, load

config = dataclasses.replace(
    load("e2e_gemma"),
    drafter=str(DEMO / "e2e_gemma_foreign_drafter"),
    block_size=3,
    missing="Train it with python scripts/finetune.py --config=e2e_gemma_foreign_drafter.",
)
