"""The shipped verifier and a drafter of bytes, once it is trained."""

import dataclasses

from speccascade_jax.config import load

config = dataclasses.replace(
    load("demo"),
    router=None,
    drafter="runs/demo_bytes_drafter",
    vocabulary="slem",
    missing="Make it with python scripts/finetune.py --config=demo_bytes_drafter.",
)
