"""The data-to-text pair: facts about a restaurant to a sentence. Its models are so small that deciding where
a draft ends costs more than drafting, so its adaptive blocks never stop early."""

from speccascade_jax.config import DEMO, DecodeConfig

config = DecodeConfig(
    drafter=str(DEMO / "e2e_drafter"),
    verifier=str(DEMO / "e2e_verifier"),
    method="token_v3",
    alpha=0.2,
    max_block_size=7,
    stop_below=0.0,
    max_source_length=64,
    max_new_tokens=96,
    router=str(DEMO / "e2e_router.json"),
    task="e2e_verifier",
    examples=(
        "name[The Eagle], eatType[pub], food[Italian], priceRange[moderate], area[riverside]",
        "name[Clowns], eatType[coffee shop], customer rating[5 out of 5], familyFriendly[yes]",
    ),
)
