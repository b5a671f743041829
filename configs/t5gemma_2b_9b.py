"""T5Gemma 2B-2B drafts for 9B-9B: 51.9 GB of weights in bfloat16, split over eight chips of 16 GB."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="hf://google/t5gemma-2b-2b-ul2-it",
    verifier="hf://google/t5gemma-9b-9b-ul2-it",
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
