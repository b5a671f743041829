"""The small decoder-only pair, once scripts/finetune.py has made it; gamma 1 as in the paper's Gemma runs."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="runs/e2e_gemma_drafter", verifier="runs/e2e_gemma_verifier", method="token_v3", alpha=0.2,
    block_size=1, suffix=" =", max_source_length=56, max_new_tokens=56,
    examples=("name[The Vaults], eatType[pub], priceRange[more than £30], customer rating[5 out of 5], "
              "near[Café Adriatic]",),
    missing="Make it with python scripts/finetune.py --config=e2e_gemma_verifier, then "
            "--config=e2e_gemma_drafter.")
