"""Qwen 3 8B with its DFlash drafter, which writes 15 tokens in one pass: 18.5 GB of weights in bfloat16,
split over two chips of 16 GB. The drafter was trained on answers without thinking."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="hf://z-lab/Qwen3-8B-DFlash-b16",
    verifier="hf://Qwen/Qwen3-8B",
    method="speculative",
    block_size=15,
    dtype="bfloat16",
    tensor_parallel=2,
    chat=True,
    max_source_length=2048,
    max_new_tokens=512,
    examples=("Why does ice float on water?",),
)
