"""The learned mixture of the bundled pair: python scripts/finetune.py --config=demo_mixture."""

from speccascade_jax.config import LearnedRuleConfig

config = LearnedRuleConfig(
    name="demo_mixture", output="runs/demo_mixture/mixture.json", pair="demo", method="learned_mixture"
)
