"""T5 1.1 small drafts for T5 1.1 large, both fine-tuned on WMT14 EN->DE (the paper's pair)."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="runs/wmt_small", verifier="runs/wmt_large",
    method="token_v3", alpha=0.2, block_size=5, temperature=1.0,
    max_source_length=80, max_new_tokens=80, prefix="translate English to German: ",
    missing="Give fine-tuned T5 1.1 folders (Hugging Face safetensors with spiece.model) with "
            "--drafter=FOLDER --verifier=FOLDER, or fine-tune google/t5-v1_1-small and "
            "google/t5-v1_1-large with scripts/finetune.py into runs/wmt_small and runs/wmt_large.")
