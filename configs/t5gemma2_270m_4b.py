"""T5Gemma 2 270M-270M drafts for 4B-4B: 14.9 GB of weights in bfloat16, split over two chips of 16 GB."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="hf://google/t5gemma-2-270m-270m",
    verifier="hf://google/t5gemma-2-4b-4b",
    method="token_v3",
    alpha=0.2,
    block_size=4,
    temperature=1.0,
    dtype="bfloat16",
    tensor_parallel=2,
    max_source_length=2048,
    max_new_tokens=512,
    examples=("Q: Why does ice float on water? A:",),
)
