"""The research pair on Multi30k, which has to be trained first."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="runs/multi30k_drafter",
    verifier="runs/multi30k_verifier",
    method="token_v3",
    alpha=0.2,
    max_source_length=64,
    max_new_tokens=64,
    task="multi30k_verifier",
    missing="Train it with python scripts/finetune.py --config=multi30k_verifier, then "
    "--config=multi30k_drafter.",
)
