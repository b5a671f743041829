"""Mistral 7B drafts for Large, 123B: 259.7 GB of weights in bfloat16, split over eight chips of 80 GB."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="hf://mistralai/Mistral-7B-Instruct-v0.3",
    verifier="hf://mistralai/Mistral-Large-Instruct-2407",
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
