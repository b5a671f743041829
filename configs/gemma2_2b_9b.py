"""Gemma 2 2B drafts for 9B, from the Hugging Face hub; block size 1 as in the paper."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="hf://google/gemma-2-2b",
    verifier="hf://google/gemma-2-9b",
    method="token_v3",
    alpha=0.2,
    block_size=1,
    temperature=1.0,
    dtype="bfloat16",
    max_source_length=2048,
    max_new_tokens=320,
    stop=("\n\n",),
    examples=("Q: Why does ice float on water?\nA:",),
)
