"""Gemma 2 2B drafts for 27B (the paper's pair), both cut over eight devices."""

import dataclasses

from speccascade_jax.config import load

config = dataclasses.replace(load("gemma2_2b_9b"), verifier="hf://google/gemma-2-27b", tensor_parallel=8)
