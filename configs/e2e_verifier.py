"""The data-to-text verifier: E2E NLG (its data is CC BY-SA 4.0), small and from scratch."""

from speccascade_jax.config import DATA, Task, TrainConfig
from speccascade_jax.models.t5 import T5Config

task = Task(
    train=f"{DATA}/e2e_nlg/train.jsonl.gz",
    validation=f"{DATA}/e2e_nlg/validation.jsonl.gz",
    test=f"{DATA}/e2e_nlg/test.jsonl.gz",
    metric="rouge2",
    max_source_length=64,
    max_target_length=96,
)

config = TrainConfig(
    name="e2e_verifier",
    output_dir="runs/e2e_verifier",
    shipped="e2e_verifier",
    task=task,
    tokenizer="runs/e2e_tokenizer.model",
    tokenizer_size=512,
    model=T5Config(
        vocab_size=512,
        d_model=192,
        d_kv=64,
        num_heads=3,
        d_ff=384,
        num_encoder_layers=2,
        num_decoder_layers=4,
        dropout_rate=0.1,
    ),
    steps=2400,
    batch_tokens=2048,
    optimizer="adamw",
    learning_rate=0.015,
    warmup_steps=100,
    decay="linear",
    clip_norm=1.0,
    eval_every=400,
    save_every=200,
    validation_examples=64,
)
