"""The decoder-only data-to-text pair, restaurant facts to a sentence; block size 1, as in the paper for
Gemma."""

from speccascade_jax.config import DEMO, DecodeConfig

config = DecodeConfig(
    drafter=str(DEMO / "e2e_gemma_drafter"),
    verifier=str(DEMO / "e2e_gemma_verifier"),
    method="token_v3",
    alpha=0.2,
    block_size=1,
    suffix=" =",
    max_source_length=56,
    max_new_tokens=56,
    task="e2e_gemma_verifier",
    examples=(
        "name[The Vaults], eatType[pub], priceRange[more than £30], customer rating[5 out of 5], "
        "near[Café Adriatic]",
    ),
)
