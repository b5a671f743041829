"""Qwen3 0.6B drafts for Llama 3.1 8B across vocabularies: 17.3 GB of weights, on two chips of 16 GB."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="hf://Qwen/Qwen3-0.6B",
    verifier="hf://meta-llama/Llama-3.1-8B-Instruct",
    method="token_v3",
    alpha=0.2,
    block_size=4,
    temperature=1.0,
    dtype="bfloat16",
    tensor_parallel=2,
    vocabulary="auto",  # theirs differ: tokens that both have are drafted
    max_source_length=2048,
    max_new_tokens=512,
    chat=True,
    examples=("Why does ice float on water?",),
)
