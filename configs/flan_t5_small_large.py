"""Flan-T5 small drafts for Flan-T5 large, from the Hugging Face hub."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="hf://google/flan-t5-small",
    verifier="hf://google/flan-t5-large",
    method="token_v3",
    alpha=0.2,
    block_size=5,
    max_source_length=512,
    max_new_tokens=128,
    examples=(
        "Translate to German: The weather is lovely today, so we will walk to the lake.",
        "Answer the question: Why does ice float on water?",
    ),
)
