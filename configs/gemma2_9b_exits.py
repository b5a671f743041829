"""Gemma 2 9B drafts for itself, with two of the exits trained by gemma2_9b_heads."""

from speccascade_jax.config import DecodeConfig, load

NETWORK = load("gemma2_9b_heads").output_dir

config = DecodeConfig(
    models=(f"{NETWORK}@7", f"{NETWORK}@14", NETWORK),
    method="speculative",
    block_size=(2, 5),
    dtype="bfloat16",
    max_source_length=2048,
    max_new_tokens=320,
    stop=("\n\n",),
    examples=("Q: Why does ice float on water?\nA:",),
)
