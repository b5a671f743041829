"""A deep, narrow model with early exits (LayerSkip), on Multi30k EN->DE from scratch: sixteen decoder layers,
with exits after 2, 4 and 8 layers that share its head.

Decode it as runs/multi30k_deep@4 and runs/multi30k_deep.
"""

from speccascade_jax.config import ExitTraining, TrainConfig, load
from speccascade_jax.models import ExitsConfig
from speccascade_jax.models.t5 import T5Config

config = TrainConfig(
    name="multi30k_deep",
    output_dir="runs/multi30k_deep",
    task=load("multi30k_verifier").task,
    tokenizer="runs/multi30k_deep_tokenizer.model",
    tokenizer_size=2048,
    model=ExitsConfig(
        T5Config(
            vocab_size=2048,
            d_model=256,
            d_kv=64,
            num_heads=4,
            d_ff=512,
            num_encoder_layers=2,
            num_decoder_layers=16,
            dropout_rate=0.1,
        ),
        layers=(2, 4, 8),
    ),
    exits=ExitTraining(frozen=False, layer_dropout=0.1, exit_weight=0.2, curriculum="rotational"),
    distillation=0.0,
    steps=6000,
    batch_tokens=2048,
    optimizer="adamw",
    learning_rate=0.01,
    warmup_steps=400,
    decay="linear",
    clip_norm=1.0,
    label_smoothing=0.1,
)
