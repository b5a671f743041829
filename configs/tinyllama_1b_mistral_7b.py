"""TinyLlama 1.1B drafts for Mistral 7B across vocabularies: 16.7 GB of weights, on two chips of 16 GB."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="hf://TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    verifier="hf://mistralai/Mistral-7B-Instruct-v0.3",
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
