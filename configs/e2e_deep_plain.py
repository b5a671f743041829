"""The full model of e2e_deep trained as usual, without exits."""

import dataclasses

from speccascade_jax.config import ExitTraining, load

DEEP = load("e2e_deep")

config = dataclasses.replace(
    DEEP, name="e2e_deep_plain", output_dir="runs/e2e_deep_plain", model=DEEP.model.full, exits=ExitTraining()
)
