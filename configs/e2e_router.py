"""The learned rule of the data-to-text pair: python scripts/finetune.py --config=e2e_router."""

from speccascade_jax.config import LearnedRuleConfig

config = LearnedRuleConfig(
    name="e2e_router",
    output="runs/e2e_router/router.json",
    shipped="e2e_router.json",
    pair="e2e",
    places=3,
    dtype="int8",
)
