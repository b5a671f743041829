"""The instruction-tuned Gemma 2 2B and 27B, in their own template."""

import dataclasses

from speccascade_jax.config import load

config = dataclasses.replace(
    load("gemma2_2b_27b"),
    drafter="hf://google/gemma-2-2b-it",
    verifier="hf://google/gemma-2-27b-it",
    prefix="<start_of_turn>user\n",
    suffix="<end_of_turn>\n<start_of_turn>model\n",
    stop=("<end_of_turn>",),
)
