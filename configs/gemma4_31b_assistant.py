"""Gemma 4 31B with its assistant: 62.3 GB of weights in bfloat16, split over eight chips of 16 GB."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="hf://google/gemma-4-31B-it-assistant",
    verifier="hf://google/gemma-4-31B-it",
    method="speculative",
    block_size=4,
    temperature=1.0,
    dtype="bfloat16",
    tensor_parallel=8,
    max_source_length=2048,
    max_new_tokens=512,
    chat=True,
    examples=("Why does ice float on water?",),
)
