"""The demo verifier, fine-tuned on Multi30k EN->DE (image captions; for research only)."""

import dataclasses

from speccascade_jax.config import DATA, DEMO, Task, load

MULTI30K = f"{DATA}/multi30k_en_de"
VERIFIER = load("demo_verifier")

config = dataclasses.replace(
    VERIFIER,
    name="multi30k_verifier",
    output_dir="runs/multi30k_verifier",
    shipped=None,
    init=str(DEMO / "verifier"),
    tokenizer=None,
    model=dataclasses.replace(VERIFIER.model, dropout_rate=0.2),
    task=Task(
        train=f"{MULTI30K}/train.jsonl.gz",
        validation=f"{MULTI30K}/validation.jsonl.gz",
        test=f"{MULTI30K}/test.jsonl.gz",
        max_source_length=64,
        max_target_length=64,
    ),
    label_smoothing=0.1,
    learning_rate=0.005,
    warmup_steps=100,
    steps=4400,
)
