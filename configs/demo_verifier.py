"""The bundled verifier: English to German on Tatoeba, one to four sentences per example, from scratch."""

from speccascade_jax.config import DATA, Task, TrainConfig
from speccascade_jax.models.t5 import T5Config

task = Task(
    train=f"{DATA}/tatoeba_en_de/train.jsonl.gz",
    validation=f"{DATA}/tatoeba_en_de/validation.jsonl.gz",
    test=f"{DATA}/tatoeba_en_de/test.jsonl.gz",
    max_source_length=80,
    max_target_length=80,
    join=4,
)

config = TrainConfig(
    name="demo_verifier",
    output_dir="runs/demo_verifier",
    shipped="verifier",
    task=task,
    tokenizer="runs/demo_tokenizer.model",
    tokenizer_size=2048,
    model=T5Config(
        vocab_size=2048,
        d_model=512,
        d_kv=64,
        num_heads=8,
        d_ff=1024,
        num_encoder_layers=4,
        num_decoder_layers=5,
        dropout_rate=0.1,
    ),
    steps=4500,
    batch_tokens=2048,
    optimizer="adamw",
    learning_rate=0.015,
    warmup_steps=200,
    decay="linear",
    clip_norm=1.0,
)
