"""The shipped pair with a model between the two: three levels, lossless."""

import dataclasses

from speccascade_jax.config import DEMO, load

config = dataclasses.replace(
    load("demo"), drafter="", verifier="", models=tuple(str(DEMO / name) for name in (
        "drafter", "middle", "verifier")), method="speculative", alpha=0.0, block_size=(2, 4))
