"""The data-to-text pair with a larger verifier, which has to be trained first. A drafter's step is cheap next
to the verifier's, so blocks are long; the settings were chosen on validation inputs."""

import dataclasses

from speccascade_jax.config import load

config = dataclasses.replace(
    load("e2e"),
    drafter="runs/e2e_large_drafter",
    verifier="runs/e2e_large_verifier",
    router=None,
    block_size=12,
    max_block_size=20,
    stop_below=0.03,
    task="e2e_large_verifier",
    missing="Train it with python scripts/finetune.py --config=e2e_large_verifier, then "
    "--config=e2e_large_drafter.",
)
