"""Llama 3.1 8B with an EAGLE-3 head: 16.9 GB of weights in bfloat16, split over two chips of 16 GB."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="hf://yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    verifier="hf://meta-llama/Llama-3.1-8B-Instruct",
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
