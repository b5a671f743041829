"""The data-to-text verifier without a drafter: drafts are looked up in its source and its output."""

from speccascade_jax.config import DEMO, DecodeConfig

config = DecodeConfig(
    drafter="lookup",
    verifier=str(DEMO / "e2e_verifier"),
    method="speculative",
    block_size=5,
    max_source_length=64,
    max_new_tokens=96,
    task="e2e_verifier",
    examples=(
        "name[The Eagle], eatType[pub], food[Italian], priceRange[moderate], area[riverside]",
        "name[Clowns], eatType[coffee shop], customer rating[5 out of 5], familyFriendly[yes]",
    ),
)
