"""T5 1.1 small drafts for T5 1.1 large, both fine-tuned on WMT14 EN->DE (the paper's pair)."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="runs/wmt_small",
    verifier="runs/wmt_large",
    task="wmt_large",
    method="token_v3",
    alpha=0.2,
    block_size=5,
    temperature=1.0,
    max_source_length=80,
    max_new_tokens=80,
    prefix="translate English to German: ",
    missing="Train it with python scripts/finetune.py --config=wmt_small (drafter) and --config=wmt_large "
    "(verifier), or give fine-tuned checkpoints with --drafter=FOLDER --verifier=FOLDER.",
)
