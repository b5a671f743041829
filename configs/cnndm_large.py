"""T5 1.1 large (lm100k) on CNN/DailyMail; all other settings are those of cnndm_small."""

import dataclasses

from speccascade_jax.config import load
from speccascade_jax.models.t5 import PRESETS

config = dataclasses.replace(
    load("cnndm_small"),
    name="cnndm_large",
    output_dir="runs/cnndm_large",
    init="gs://t5-data/pretrained_models/t5x/t5_1_1_lm100k_large/checkpoint_1100000",
    model=PRESETS["t5_1_1_large"],
    split_parameters=True,
    remat=True,
)
