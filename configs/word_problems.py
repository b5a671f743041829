"""A decoder-only pair in the Qwen 3 architecture: word problems, solved step by step. Train it first."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="runs/word_problems_drafter",
    verifier="runs/word_problems_verifier",
    method="speculative",
    block_size=5,
    suffix=" =",
    max_source_length=160,
    max_new_tokens=112,
    task="word_problems_verifier",
    missing="Make it with python scripts/finetune.py --config=word_problems_verifier, then "
    "word_problems_drafter.",
    examples=(
        "There are 5 apples. There are 3 more pears than apples. There are twice as many nuts as pears. How "
        "many nuts are there?",
    ),
)
