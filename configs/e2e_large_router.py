"""The learned rule of e2e_large: python scripts/finetune.py --config=e2e_large_router."""

from speccascade_jax.config import RouterConfig

config = RouterConfig(name="e2e_large_router", output="runs/e2e_large_router/router.json", pair="e2e_large",
                      dtype="int8")
