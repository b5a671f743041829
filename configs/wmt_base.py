"""T5 1.1 base (lm100k) on WMT14 EN->DE; all other settings are those of wmt_small."""

import dataclasses

from speccascade_jax.config import load
from speccascade_jax.models.t5 import PRESETS

config = dataclasses.replace(
    load("wmt_small"),
    name="wmt_base",
    output_dir="runs/wmt_base",
    init="gs://t5-data/pretrained_models/t5x/t5_1_1_lm100k_base/checkpoint_1100000",
    model=PRESETS["t5_1_1_base"],
)
