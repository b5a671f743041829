"""The shipped verifier with a drafter that writes a whole draft in one pass, once it is trained."""

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
    missing="Make it with python scripts/finetune.py --config=demo_block_drafter.",
)
