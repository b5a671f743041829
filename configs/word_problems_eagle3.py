"""An EAGLE-3 head for word_problems_verifier, which is frozen.

It learns to draft from the verifier's states and, up to five tokens ahead, from its own outputs.
"""

import dataclasses

from speccascade_jax.config import DEMO, ExitTraining, load
from speccascade_jax.models import EagleConfig, EaglePairConfig

VERIFIER = load("word_problems_verifier")
SAME = ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads", "num_kv_heads", "norm_epsilon", "rope_theta")
ENDS = ("pad_id", "eos_id", "bos_id", "max_positions")

config = dataclasses.replace(
    VERIFIER,
    name="word_problems_eagle3",
    output_dir="runs/word_problems_eagle3",
    shipped=None,
    init=str(DEMO / "word_problems_verifier"),
    tokenizer=None,
    model=EaglePairConfig(
        VERIFIER.model,
        EagleConfig(
            **{name: getattr(VERIFIER.model, name) for name in (*SAME, *ENDS)},
            draft_vocab_size=VERIFIER.model.vocab_size,
            state_width=VERIFIER.model.d_model,
            layers=(1, 3, 5),
        ),
    ),
    exits=ExitTraining(frozen=True, ahead=5),
    distillation=1.0,
    steps=2000,
    batch_tokens=4096,
    learning_rate=0.02,
    validation_examples=0,
)
