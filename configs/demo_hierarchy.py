"""The shipped pair with demo_middle between the two: three levels, lossless."""

import dataclasses

from speccascade_jax.config import DEMO, load

config = dataclasses.replace(
    load("demo"),
    router=None,
    drafter="",
    verifier="",
    models=tuple(str(DEMO / name) for name in ("drafter", "middle", "verifier")),
    method="speculative",
    alpha=0.0,
    block_size=(2, 4),
    missing="Make it with python scripts/finetune.py --config=demo_middle.",
)
