"""The bundled verifier with a drafter that writes a whole draft in one pass, which has to be trained
first."""

import dataclasses

from speccascade_jax.config import load

FOLDER = "runs/demo_block_drafter"

config = dataclasses.replace(
    load("demo"),
    router=None,
    drafter="",
    verifier="",
    models=(f"{FOLDER}@drafter", FOLDER),
    method="speculative",
    alpha=0.0,
    block_size=8,
    missing="Train it with python scripts/finetune.py --config=demo_block_drafter.",
)
