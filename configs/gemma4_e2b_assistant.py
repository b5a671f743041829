"""Gemma 4 E2B with its assistant: 9.4 GB of weights in bfloat16."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="hf://google/gemma-4-E2B-it-assistant",
    verifier="hf://google/gemma-4-E2B-it",
    method="speculative",
    block_size=4,
    temperature=1.0,
    dtype="bfloat16",
    max_source_length=2048,
    max_new_tokens=512,
    chat=True,
    examples=("Why does ice float on water?",),
)
