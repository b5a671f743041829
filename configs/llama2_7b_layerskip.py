"""Llama 2 7B trained further to draft for itself (LayerSkip): 27 GB in float32, on 16 chips of 16 GB.

Exits after 7 and 9 of its 32 layers share its head. Decode it with llama2_7b_exits.
"""

import dataclasses

from speccascade_jax.config import ExitTraining, load
from speccascade_jax.models import ExitsConfig
from speccascade_jax.models.presets import PRESETS

config = dataclasses.replace(
    load("e2e_gemma_verifier"),
    name="llama2_7b_layerskip",
    output_dir="runs/llama2_7b_layerskip",
    shipped=None,
    init="hf://meta-llama/Llama-2-7b-hf",
    tokenizer=None,
    model=ExitsConfig(PRESETS["llama2_7b"], layers=(7, 9)),
    exits=ExitTraining(frozen=False, layer_dropout=0.1, exit_weight=0.2, curriculum="rotational"),
    distillation=0.0,
    label_smoothing=0.0,
    steps=5000,
    learning_rate=0.001,
    warmup_steps=200,
    optimizer="adafactor",
    split_parameters=True,
    remat=True,
    validation_examples=0,
)
