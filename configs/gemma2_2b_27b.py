"""Gemma 2 2B drafts for 27B (the paper's pair): 59.7 GB of weights in bfloat16, split over eight chips."""

import dataclasses

from speccascade_jax.config import load

config = dataclasses.replace(load("gemma2_2b_9b"), verifier="hf://google/gemma-2-27b", tensor_parallel=8)
