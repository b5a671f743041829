"""Llama 2 7B drafts for itself with its first 7 and 9 of 32 layers: 13.5 GB in bfloat16, on two chips of 16
GB.

The network is that of llama2_7b_layerskip.
"""

from speccascade_jax.config import DecodeConfig, load

NETWORK = load("llama2_7b_layerskip").output_dir

config = DecodeConfig(
    models=(f"{NETWORK}@7", f"{NETWORK}@9", NETWORK),
    method="speculative",
    block_size=(2, 5),
    dtype="bfloat16",
    tensor_parallel=2,
    max_source_length=2048,
    max_new_tokens=512,
    missing="Train it with python scripts/finetune.py --config=llama2_7b_layerskip.",
    examples=("Q: Why does ice float on water?\nA:",),
)
