"""A pair in the Qwen 3 architecture that solves word problems step by step."""

from speccascade_jax.config import DEMO, DecodeConfig

config = DecodeConfig(
    drafter=str(DEMO / "word_problems_drafter"),
    verifier=str(DEMO / "word_problems_verifier"),
    method="speculative",
    block_size=8,
    suffix=" =",
    max_source_length=160,
    max_new_tokens=112,
    task="word_problems_verifier",
    examples=(
        "There are 5 apples. There are 3 more pears than apples. There are twice as many nuts as pears. How "
        "many nuts are there?",
    ),
)
