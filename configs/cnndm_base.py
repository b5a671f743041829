"""T5 1.1 base (lm100k) on CNN/DailyMail; all other settings are those of cnndm_small."""

import dataclasses

from speccascade_jax.config import load
from speccascade_jax.models.t5 import PRESETS

config = dataclasses.replace(
    load("cnndm_small"),
    name="cnndm_base",
    output_dir="runs/cnndm_base",
    init="gs://t5-data/pretrained_models/t5x/t5_1_1_lm100k_base/checkpoint_1100000",
    model=PRESETS["t5_1_1_base"],
)
