"""Facts from DBpedia to a text: WebNLG (its data is CC BY-NC-SA 4.0), from scratch. Its texts quote the long
names in the facts (see webnlg_lookup).
"""

from speccascade_jax.config import DATA, Task, TrainConfig
from speccascade_jax.models.t5 import T5Config

task = Task(
    train=f"{DATA}/webnlg/train.jsonl.gz",
    validation=f"{DATA}/webnlg/validation.jsonl.gz",
    test=f"{DATA}/webnlg/test.jsonl.gz",
    metric="rouge2",
    max_source_length=160,
    max_target_length=96,
)

config = TrainConfig(
    name="webnlg_verifier",
    output_dir="runs/webnlg_verifier",
    task=task,
    tokenizer="runs/webnlg_tokenizer.model",
    tokenizer_size=2048,
    model=T5Config(
        vocab_size=2048,
        d_model=384,
        d_kv=64,
        num_heads=6,
        d_ff=1024,
        num_encoder_layers=3,
        num_decoder_layers=4,
        dropout_rate=0.1,
    ),
    steps=2000,
    batch_tokens=2048,
    optimizer="adamw",
    learning_rate=0.015,
    warmup_steps=200,
    decay="linear",
    clip_norm=1.0,
    validation_examples=64,
)
