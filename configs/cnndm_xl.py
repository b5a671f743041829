"""T5 1.1 xl (lm100k) on CNN/DailyMail; all other settings are those of cnndm_small."""

import dataclasses

from speccascade_jax.config import load
from speccascade_jax.models.t5 import PRESETS

config = dataclasses.replace(
    load("cnndm_small"),
    name="cnndm_xl",
    output_dir="runs/cnndm_xl",
    init="gs://t5-data/pretrained_models/t5x/t5_1_1_lm100k_xl/checkpoint_1100000",
    model=PRESETS["t5_1_1_xl"],
    split_parameters=True,
    remat=True,
)
