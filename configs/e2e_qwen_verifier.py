"""A small Qwen 3 on E2E NLG, as large as e2e_gemma_verifier and trained like it, from scratch."""

import dataclasses

from speccascade_jax.config import DEMO, load
from speccascade_jax.models.presets import QWEN3

config = dataclasses.replace(
    load("e2e_gemma_verifier"),
    name="e2e_qwen_verifier",
    output_dir="runs/e2e_qwen_verifier",
    shipped=None,
    tokenizer=str(DEMO / "e2e_gemma_verifier" / "spiece.model"),
    model=dataclasses.replace(
        QWEN3,
        vocab_size=1024,
        d_model=256,
        d_kv=32,
        d_ff=640,
        num_heads=8,
        num_kv_heads=4,
        num_layers=4,
        tied_embeddings=True,
        max_positions=2048,
        pad_id=0,
        eos_id=1,
        bos_id=2,
    ),
)
