"""The bundled pair with demo_middle, which has to be trained first, between the two: a lossless hierarchy of
three."""

import dataclasses

from speccascade_jax.config import DEMO, load

config = dataclasses.replace(
    load("demo"),
    router=None,
    drafter="",
    verifier="",
    models=(str(DEMO / "drafter"), "runs/demo_middle", str(DEMO / "verifier")),
    method="speculative",
    alpha=0.0,
    block_size=(2, 4),
    missing="Train it with python scripts/finetune.py --config=demo_middle.",
)
