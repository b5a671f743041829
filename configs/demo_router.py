"""The learned rule of the bundled English-to-German pair: python scripts/finetune.py --config=demo_router."""

from speccascade_jax.config import LearnedRuleConfig

config = LearnedRuleConfig(
    name="demo_router",
    output="runs/demo_router/router.json",
    shipped="router.json",
    pair="demo",
    examples=400,
    dtype="int8",
)
