"""Every experiment, with its settings."""

from speccascade_jax.experiments import speeds, verification
from speccascade_jax.experiments.findings import Experiment

LOSSLESS_SPEEDS = Experiment(
    "lossless",
    "How many times as fast as the verifier lossless decoding is, by dtype, block size and batch size.",
    "lossless",
    speeds.Lossless(
        config="demo",
        block_sizes=(3, 5, 7, 9, "adaptive"),
        temperatures=(0.0, 1.0),
        dtypes=("float32", "bfloat16"),
        batch_sizes=(1, 16),
        timed=96,
        trials=3,
    ),
)
BLOCK_CALLS = Experiment(
    "verification-calls",
    "How many more tokens a verifier call yields where drafts are verified as a block.",
    "verification",
    verification.Calls(
        pairs=("demo", "e2e", "e2e_gemma"),
        rules=(("speculative", 0.0), ("opt", 0.1)),
        block_sizes=(5, 8, 12),
        inputs=400,
        seeds=3,
    ),
)
BLOCK_TIMES = Experiment(
    "verification-times",
    "How much faster whole decodings are where drafts are verified as a block.",
    "verification",
    verification.Times(
        config="demo",
        block_sizes=(3, 5, 7, 9),
        temperatures=(0.0, 1.0),
        dtypes=("float32", "bfloat16"),
        batch_sizes=(1, 16),
        timed=64,
        trials=3,
    ),
)

EXPERIMENTS = {experiment.name: experiment for experiment in (LOSSLESS_SPEEDS, BLOCK_CALLS, BLOCK_TIMES)}
"""By name."""
