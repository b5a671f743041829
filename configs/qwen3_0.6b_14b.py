"""Qwen3 0.6B drafts for 14B: 30.7 GB of weights in bfloat16, split over four chips of 16 GB."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="hf://Qwen/Qwen3-0.6B",
    verifier="hf://Qwen/Qwen3-14B",
    method="token_v3",
    alpha=0.2,
    block_size=4,
    temperature=1.0,
    dtype="bfloat16",
    tensor_parallel=4,
    max_source_length=2048,
    max_new_tokens=512,
    chat=True,
    examples=("Why does ice float on water?",),
)
