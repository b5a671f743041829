"""The full model of multi30k_deep trained as usual, without exits."""

import dataclasses

from speccascade_jax.config import load

DEEP = load("multi30k_deep")

config = dataclasses.replace(
    DEEP, name="multi30k_deep_plain", output_dir="runs/multi30k_deep_plain", model=DEEP.model.full
)
