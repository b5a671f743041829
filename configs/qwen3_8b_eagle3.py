"""Qwen 3 8B with an EAGLE-3 head: 17.2 GB of weights in bfloat16, split over two chips of 16 GB."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="hf://AngelSlim/Qwen3-8B_eagle3",
    verifier="hf://Qwen/Qwen3-8B",
    method="speculative",
    block_size=4,
    temperature=1.0,
    dtype="bfloat16",
    tensor_parallel=2,
    max_source_length=2048,
    max_new_tokens=512,
    chat=True,
    examples=("Why does ice float on water?",),
)
