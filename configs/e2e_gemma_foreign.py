"""The shipped decoder-only verifier and a drafter of another vocabulary."""

import dataclasses

from speccascade_jax.config import DEMO, load

config = dataclasses.replace(
    load("e2e_gemma"),
    drafter=str(DEMO / "e2e_gemma_foreign_drafter"),
    block_size=3,
    missing="Make it with python scripts/finetune.py --config=e2e_gemma_foreign_drafter.",
)
