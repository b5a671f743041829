"""The learned rule of the Multi30k pair: python scripts/finetune.py --config=multi30k_router."""

from speccascade_jax.config import LearnedRuleConfig

config = LearnedRuleConfig(
    name="multi30k_router", output="runs/multi30k_router/router.json", pair="multi30k", dtype="int8"
)
