"""The shipped verifier and a drafter of bytes."""

import dataclasses

from speccascade_jax.config import DEMO, load

config = dataclasses.replace(
    load("demo"),
    router=None,
    drafter=str(DEMO / "bytes_drafter"),
    vocabulary="slem",
    missing="Make it with python scripts/finetune.py --config=demo_bytes_drafter.",
)
