"""T5 1.1 small (lm100k) on WMT14 EN->DE, as in the paper: 80/80 tokens, Adafactor at a constant 1e-3."""

from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.models.t5 import PRESETS

T5X = "gs://t5-data/pretrained_models/t5x"

config = TrainConfig(
    name="wmt_small",
    output_dir="runs/wmt_small",
    model=PRESETS["t5_1_1_small"],
    init=f"{T5X}/t5_1_1_lm100k_small/checkpoint_1100000",
    tokenizer="gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model",
    task=Task(
        train="hf://wmt/wmt14/de-en:train",
        validation="hf://wmt/wmt14/de-en:validation",
        test="hf://wmt/wmt14/de-en:test",
        source_field="translation.en",
        target_field="translation.de",
        prefix="translate English to German: ",
        metric="bleu",
        max_source_length=80,
        max_target_length=80,
    ),
    steps=100_000,
    batch_tokens=16384,
    eval_every=5000,
    save_every=5000,
    log_every=100,
    validation_examples=1024,
)
