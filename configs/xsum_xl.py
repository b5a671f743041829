"""T5 1.1 xl (lm100k) on XSum; all other settings are those of xsum_small."""

import dataclasses

from speccascade_jax.config import load
from speccascade_jax.models.t5 import PRESETS

config = dataclasses.replace(
    load("xsum_small"),
    name="xsum_xl",
    output_dir="runs/xsum_xl",
    init="gs://t5-data/pretrained_models/t5x/t5_1_1_lm100k_xl/checkpoint_1100000",
    model=PRESETS["t5_1_1_xl"],
    split_parameters=True,
    remat=True,
)
