"""The shipped pair with demo_middle between the two, once it is trained: three levels, lossless."""

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
    missing="Make it with python scripts/finetune.py --config=demo_middle.",
)
