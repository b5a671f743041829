"""The bundled verifier and a byte-level drafter, which has to be trained first."""

import dataclasses

from speccascade_jax.config import load

config = dataclasses.replace(
    load("demo"),
    router=None,
    drafter="runs/demo_bytes_drafter",
    vocabulary="slem",
    missing="Train it with python scripts/finetune.py --config=demo_bytes_drafter.",
)
