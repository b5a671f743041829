"""Llama 3.2 1B drafts for 3.1 8B: 18.5 GB of weights in bfloat16, split over two chips of 16 GB."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="hf://meta-llama/Llama-3.2-1B-Instruct",
    verifier="hf://meta-llama/Llama-3.1-8B-Instruct",
    method="token_v3",
    alpha=0.2,
    block_size=4,
    temperature=1.0,
    dtype="bfloat16",
    tensor_parallel=2,
    max_source_length=2048,
    max_new_tokens=512,
    chat=True,
    examples=("Why does ice float on water?",),
)
