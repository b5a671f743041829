"""Gemma 3 1B drafts for 27B: 56.0 GB of weights in bfloat16, split over eight chips of 16 GB."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="hf://google/gemma-3-1b-it",
    verifier="hf://google/gemma-3-27b-it",
    method="token_v3",
    alpha=0.2,
    block_size=4,
    temperature=1.0,
    dtype="bfloat16",
    tensor_parallel=8,
    max_source_length=2048,
    max_new_tokens=512,
    chat=True,
    examples=("Why does ice float on water?",),
)
