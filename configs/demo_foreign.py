"""The bundled verifier and a drafter with a different vocabulary of half the size."""

import dataclasses

from speccascade_jax.config import DEMO, load

config = dataclasses.replace(
    load("demo"),
    router=None,
    drafter=str(DEMO / "foreign_drafter"),
    missing="Train it with python scripts/finetune.py --config=demo_foreign_drafter.",
)
