"""T5 1.1 small (lm100k) on XSum, as in the paper: 1024/64 tokens, Adafactor at a constant 1e-3."""

from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.models.t5 import PRESETS

T5X = "gs://t5-data/pretrained_models/t5x"

config = TrainConfig(
    name="xsum_small",
    output_dir="runs/xsum_small",
    model=PRESETS["t5_1_1_small"],
    init=f"{T5X}/t5_1_1_lm100k_small/checkpoint_1100000",
    tokenizer="gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model",
    task=Task(
        train="hf://EdinburghNLP/xsum:train",
        validation="hf://EdinburghNLP/xsum:validation",
        test="hf://EdinburghNLP/xsum:test",
        source_field="document",
        target_field="summary",
        prefix="summarize: ",
        metric="rouge2",
        max_source_length=1024,
        max_target_length=64,
    ),
    steps=30_000,
    batch_tokens=65536,
    eval_every=2000,
    save_every=2000,
    log_every=100,
    validation_examples=1024,
)
