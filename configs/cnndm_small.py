"""T5 1.1 small (lm100k) on CNN/DailyMail, as in the paper: 2048/128 tokens, Adafactor at a constant 1e-3."""

from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.models.t5 import PRESETS

T5X = "gs://t5-data/pretrained_models/t5x"

config = TrainConfig(
    name="cnndm_small",
    output_dir="runs/cnndm_small",
    model=PRESETS["t5_1_1_small"],
    init=f"{T5X}/t5_1_1_lm100k_small/checkpoint_1100000",
    tokenizer="gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model",
    task=Task(
        train="hf://abisee/cnn_dailymail/3.0.0:train",
        validation="hf://abisee/cnn_dailymail/3.0.0:validation",
        test="hf://abisee/cnn_dailymail/3.0.0:test",
        source_field="article",
        target_field="highlights",
        prefix="summarize: ",
        metric="rouge2",
        max_source_length=2048,
        max_target_length=128,
    ),
    steps=50_000,
    batch_tokens=131072,
    eval_every=2000,
    save_every=2000,
    log_every=100,
    validation_examples=1024,
)
