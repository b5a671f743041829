"""A data-to-text pair, facts about a restaurant to a sentence, once scripts/finetune.py has made it."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="runs/e2e_drafter", verifier="runs/e2e_verifier", method="token_v3", alpha=0.2,
    max_source_length=64, max_new_tokens=96,
    missing="Make it with python scripts/finetune.py --config=e2e_verifier, then --config=e2e_drafter.",
    examples=("name[The Blue Lantern], eatType[pub], food[Italian], priceRange[moderate], area[riverside]",
              "name[Clowns], eatType[coffee shop], customer rating[5 out of 5], familyFriendly[yes]"))
