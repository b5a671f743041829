"""The shipped data-to-text pair: facts about a restaurant to a sentence."""

from speccascade_jax.config import DEMO, DecodeConfig

config = DecodeConfig(
    drafter=str(DEMO / "e2e_drafter"), verifier=str(DEMO / "e2e_verifier"), method="token_v3", alpha=0.2,
    max_source_length=64, max_new_tokens=96, router=str(DEMO / "e2e_router.json"), task="e2e_verifier",
    examples=("name[The Eagle], eatType[pub], food[Italian], priceRange[moderate], area[riverside]",
              "name[Clowns], eatType[coffee shop], customer rating[5 out of 5], familyFriendly[yes]"))
