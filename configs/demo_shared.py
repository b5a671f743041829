"""The bundled verifier with a drafter that reads its encoder and its states."""

import dataclasses

from speccascade_jax.config import DEMO, load

FOLDER = str(DEMO / "shared_drafter")

config = dataclasses.replace(
    load("demo"),
    router=None,
    drafter="",
    verifier="",
    models=(f"{FOLDER}@drafter", FOLDER),
    method="speculative",
    alpha=0.0,
    block_size=5,
    missing="Train it with python scripts/finetune.py --config=demo_shared_drafter.",
)
