"""All experiments and their settings."""

from typing import Any

from speccascade_jax.experiments import (
    libraries,
    losses,
    models,
    prefixes,
    races,
    runs,
    speeds,
    sweeps,
    verification,
)
from speccascade_jax.experiments.findings import Experiment

TRADED: dict[str, Any] = {
    "methods": ("speculative", "lossy", "token_v3", "opt", "diff", "cactus", "relaxed"),
    "alphas": (0.0, 0.1, 0.3, 0.5),
    "temperatures": (0.0, 0.5, 1.0),
    "top_ps": (1.0, 0.5),
    "timed": 24,
    "trials": 2,
}
"""The settings that all trade-offs share."""

LOSSLESS: dict[str, Any] = {
    "config": "demo",
    "block_sizes": (3, 5, 7, 9, "adaptive"),
    "temperatures": (0.0, 1.0),
    "dtypes": ("float32", "bfloat16"),
    "trials": 3,
}
"""The settings that the speeds of lossless decoding share."""

LOSSLESS_SPEEDS = Experiment(
    "lossless-speeds",
    "How many times as fast as the verifier lossless decoding is at batch size 1, by dtype and block size.",
    "lossless",
    speeds.Lossless(batch_sizes=(1,), timed=96, **LOSSLESS),
)
LOSSLESS_BATCHES = Experiment(
    "lossless-batches",
    "How many times as fast as the verifier lossless decoding is at batch size 16, by dtype and block size.",
    "lossless",
    speeds.Lossless(batch_sizes=(16,), timed=32, suffix="-batches", **LOSSLESS),
)
LOSSLESS_SHARED = tuple(
    Experiment(
        f"lossless-shared-{dtype}",
        f"How much faster lossless decoding is if the drafter reads the verifier's encoder, in {dtype}.",
        "lossless",
        races.Race(
            key=f"shared-{dtype}",
            baseline="demo",
            runners=tuple(
                races.Runner(config, size)
                for config in ("demo", "demo_shared")
                for size in LOSSLESS["block_sizes"]
            ),
            temperatures=LOSSLESS["temperatures"],
            timed=96,
            trials=LOSSLESS["trials"],
            dtype=dtype,
            least_source=20,
        ),
    )
    for dtype in LOSSLESS["dtypes"]
)
WHOLE_RUNS = Experiment(
    "whole-runs",
    "How much faster whole runs of decode.py are than those of the verifier alone.",
    "lossless",
    runs.Runs(
        config="demo",
        decoders=(
            ("speculative", 0.0, 3),
            ("speculative", 0.0, 5),
            ("speculative", 0.0, 7),
            ("token_v3", 0.2, 3),
            ("token_v3", 0.2, 5),
            ("opt", 0.1, 5),
        ),
        temperatures=(0.0, 1.0),
        timed=40,
        trials=3,
    ),
)
BLOCK_CALLS = Experiment(
    "verification-calls",
    "How many more tokens a verifier call yields if drafts are verified as a block.",
    "verification",
    verification.Calls(
        pairs=("demo", "e2e", "e2e_gemma"),
        rules=(("speculative", 0.0), ("opt", 0.1)),
        block_sizes=(5, 8, 12),
        inputs=400,
        seeds=3,
    ),
)
BLOCK_EXPECTED = Experiment(
    "verification-expected",
    "How many more tokens a verifier call is expected to yield on the same texts, verified as a block.",
    "verification",
    verification.Expected(
        pairs=("demo", "e2e", "e2e_gemma"),
        rules=(("speculative", 0.0), ("opt", 0.1)),
        block_sizes=(5, 8, 12),
        inputs=400,
        seeds=3,
    ),
)
BLOCK_TIMES = tuple(
    Experiment(
        f"verification-times-{config.replace('_', '-')}{suffix}",
        f"How much faster decoding is if drafts are verified as a block, with {what} at batch size {rows}.",
        "verification",
        verification.Times(
            config=config,
            block_sizes=sizes,
            temperatures=(0.0, 1.0),
            dtypes=("float32", "bfloat16"),
            batch_size=rows,
            timed=count,
            trials=trials,
            suffix=suffix,
        ),
    )
    for rows, count, trials, suffix in ((1, 128, 3, ""), (16, 80, 2, "-batches"))
    for config, what, sizes in (
        ("demo", "the translation pair", (3, 5, 7, 9)),
        ("e2e", "the data-to-text pair", (5, 8, 12)),
        ("e2e_gemma", "the decoder-only pair", (3, 5, 8)),
    )
)

OTHERS = Experiment(
    "other-libraries",
    "How fast the shipped pair is compared with transformers and CTranslate2 with the same weights.",
    "other-libraries",
    libraries.Libraries(
        config="demo",
        libraries=("hf", "ctranslate2"),
        dtypes=("float32", "bfloat16", "int8"),
        block_size=5,
        timed=60,
        trials=3,
    ),
)
QUALITY = Experiment(
    "quality",
    "How well the shipped models write at temperature 0, in float32 and in int8.",
    "shipped-pair",
    models.Models(
        pairs=("demo", "e2e", "e2e_gemma"),
        dtypes=("float32", "bfloat16", "int8"),
        inputs=1000,
    ),
)
ARCHITECTURES = Experiment(
    "architectures",
    "Whether a pair in the Qwen 3 architecture writes better than one in Gemma's of the same size.",
    "architectures",
    models.Models(pairs=("e2e_gemma", "e2e_qwen"), dtypes=("float32",), inputs=1000),
)
TRANSLATION = tuple(
    Experiment(
        f"trade-offs-translation{suffix}",
        summary,
        "trade-offs",
        sweeps.TradeOff(
            config="demo",
            block_sizes=("adaptive",),
            inputs=300,
            split="test",
            suffix=suffix,
            picture=f"tradeoff{suffix}",
            **TRADED | {"methods": methods, "temperatures": (0.0, 1.0)},
        ),
    )
    for suffix, methods, summary in (
        (
            "",
            ("speculative", "lossy", "token_v3", "opt", "cactus"),
            "The trade-offs of the rules on the shipped translation pair, with and without truncation.",
        ),
        (
            "-others",
            ("speculative", "opt", "diff", "relaxed"),
            "The trade-offs of diff and relaxed, next to opt, on the shipped translation pair.",
        ),
    )
)
DATA_TO_TEXT = Experiment(
    "trade-offs-e2e",
    "The trade-offs of the rules on the shipped data-to-text pair.",
    "trade-offs",
    sweeps.TradeOff(config="e2e", block_sizes=(7,), inputs=400, **TRADED),
)
PROBLEMS = Experiment(
    "trade-offs-word-problems",
    "The trade-offs of the rules on word problems, where depth matters.",
    "trade-offs",
    sweeps.TradeOff(config="word_problems", block_sizes=(8,), inputs=1000, split="test", **TRADED),
)
CAPTIONS = Experiment(
    "trade-offs-multi30k",
    "The trade-offs of the rules on translated picture captions.",
    "trade-offs",
    sweeps.TradeOff(config="multi30k", block_sizes=(5,), inputs=400, **TRADED),
)
SPANS = Experiment(
    "spans",
    "What lenience in the steps, or only in the answer, costs on word problems.",
    "spans",
    sweeps.Spans(
        config="word_problems",
        methods=("speculative", "opt", "lossy", "token_v3"),
        alphas=(0.0, 0.1, 0.3, 0.5),
        alphas_after=(0.0, 0.1, 0.3, 0.5),
        block_sizes=(8,),
        temperatures=(0.0, 1.0),
        inputs=1000,
        split="test",
        marker="The answer is",
    ),
)
HIERARCHIES = Experiment(
    "hierarchies",
    "Whether a third model between the two, or a drafter that reads its verifier's encoder, is faster.",
    "hierarchies",
    races.Race(
        key="in-turn",
        baseline="demo",
        runners=(
            races.Runner("demo", 5),
            races.Runner("demo_shared", 5),
            races.Runner("demo_hierarchy", (2, 4)),
            races.Runner("demo_hierarchy", (3, 5)),
        ),
        temperatures=(0.0, 1.0),
        timed=60,
        trials=3,
    ),
)
VOCABULARIES = Experiment(
    "vocabularies",
    "How much a drafter with another vocabulary gains, by the strategy that joins it.",
    "vocabularies",
    races.Race(
        key="in-turn",
        baseline="demo",
        runners=(
            races.Runner("demo", 3),
            *(races.Runner("demo_foreign", 3, (("vocabulary", way),)) for way in ("tli", "union")),
            *(races.Runner("demo_foreign", size, (("vocabulary", "slem"),)) for size in (5, 7)),
        ),
        temperatures=(0.0, 1.0),
        timed=60,
        trials=3,
    ),
)
BYTES = Experiment(
    "vocabularies-bytes",
    "What a drafter of bytes gains.",
    "vocabularies",
    races.Race(
        key="bytes-in-turn",
        baseline="demo",
        runners=tuple(
            races.Runner("demo_bytes", size, (("vocabulary", way),))
            for way, size in (("tli", 2), ("slem", 3), ("slrs", 1))
        ),
        temperatures=(0.0, 1.0),
        timed=12,
        trials=2,
        dtype="float32",
    ),
)
HEAD = (("drafter", "runs/word_problems_eagle3@drafter"), ("verifier", "runs/word_problems_eagle3"))
HEADS = Experiment(
    "eagle-word-problems",
    "Whether an EAGLE-3 head is faster than a separate drafter with as much training, on word problems.",
    "verifier-states",
    races.Race(
        key="in-turn",
        baseline="word_problems",
        runners=(
            *(races.Runner("word_problems", size) for size in (3, 5, 8, 12)),
            *(races.Runner("word_problems", size, HEAD, "EAGLE-3 head") for size in (3, 5, 8, 12)),
        ),
        temperatures=(0.0, 1.0),
        timed=60,
        trials=3,
    ),
)
ALIKE = "trained alike"
SHARED = "runs/demo_shared_drafter@drafter", "runs/demo_shared_drafter"
READERS = Experiment(
    "drafters-in-turn",
    "Whether a drafter that reads its verifier's states is faster than a separate one with as much training.",
    "verifier-states",
    races.Race(
        key="demo",
        baseline="demo",
        runners=tuple(
            races.Runner(config, size, changes, label)
            for config, label, changes in (
                ("demo", "", ()),
                ("demo", ALIKE, (("drafter", "runs/demo_drafter/export"),)),
                ("demo_shared", ALIKE, (("models", SHARED),)),
                ("demo_block", ALIKE, ()),
            )
            for size in (3, 5, 8, 12)
        ),
        temperatures=(0.0, 1.0),
        timed=60,
        trials=2,
    ),
)
QUOTED = tuple(
    Experiment(
        f"lookup-{key}",
        f"How much faster decoding with lookup is on a task whose texts quote the source, with {what}.",
        "lookup",
        races.Race(
            key=key,
            baseline="webnlg_lookup",
            runners=tuple(races.Runner("webnlg_lookup", size) for size in (2, 3, 5, 8)),
            temperatures=(0.0, 1.0),
            timed=60,
            trials=3,
            split="validation",  # unlike the test split, it has only categories that occur in training
            least_source=least,
        ),
    )
    for key, what, least in (("quoting", "all inputs", 1), ("quoting-long", "long inputs", 60))
)
LOOKUP = (("drafter", "lookup"),), "lookup"
LOOKUPS = tuple(
    Experiment(
        f"lookup-{config.replace('_', '-')}",
        f"How fast decoding with lookup is, alone and beside the drafter, with {what}.",
        "lookup",
        races.Race(
            key=config,
            baseline=config,
            runners=(
                races.Runner(config, 5),
                races.Runner(config, 5, beside="lookup"),
                races.Runner(config, 5, beside="lookup", stored=True),
                *(races.Runner(config, size, *LOOKUP) for size in (2, 5)),
                *(races.Runner(config, size, *LOOKUP, stored=True) for size in (2, 3, 5, 8)),
            ),
            temperatures=(0.0, 1.0),
            timed=120,
            trials=3,
            stored=4000,
        ),
    )
    for config, what in (
        ("e2e", "the data-to-text pair"),
        ("demo", "the translation pair"),
        ("word_problems", "the pair for word problems"),
    )
)
ROUTER = Experiment(
    "learned-rule",
    "Whether the learned rule is better than opt at the same calls.",
    "learned-rule",
    sweeps.EqualCalls(
        rule="router",
        rival="opt",
        config="demo",
        methods=("opt", "router"),
        alphas=(0.0, 0.1, 0.2, 0.3, 0.4),
        block_sizes=(5,),
        temperatures=(0.0, 1.0),
        top_ps=(1.0, 0.3),
        truncations=(),
        inputs=480,
        split="test",
    ),
)
PRICED = Experiment(
    "lookahead",
    "Whether a rule that prices a rejection by its position is better than opt at the same calls.",
    "lookahead",
    sweeps.EqualCalls(
        rule="lookahead",
        rival="opt",
        config="e2e",
        methods=("opt", "lookahead"),
        alphas=(0.0, 0.1, 0.3, 0.5, 0.7),
        block_sizes=(5,),
        temperatures=(0.0, 0.5, 1.0),
        top_ps=(1.0, 0.5),
        truncations=(),
        inputs=547,
    ),
)
REJECTION = Experiment(
    "rejection",
    "How much each rule rejects, and its quality, with the decoder-only pair.",
    "rejection",
    sweeps.Rejections(
        config="e2e_gemma",
        methods=("speculative", "lossy", "chow", "diff", "opt", "token_v1", "token_v2", "token_v3"),
        alphas=tuple(n / 10 for n in range(11)),
        block_sizes=(1,),
        temperatures=(1.0,),
        inputs=547,
        picture="rejection",
    ),
)

LOSSES = tuple(
    Experiment(
        f"losses-{config.replace('_', '-')}",
        f"Which divergence a drafter should learn from, with {what}.",
        "losses",
        losses.Losses(
            config=config,
            training=f"{config}_drafter",
            divergences=("kl", "tv", "lk", "lk_hybrid", "kl_to_lk"),
            rules=(("speculative", 0.0), ("opt", 0.1)),
            seeds=3,
            steps=steps,
            batch_tokens=tokens,
            learning_rate=0.02,
            block_size=size,
            inputs=400,
        ),
    )
    for config, what, size, steps, tokens in (
        ("demo", "the translation pair", 5, 1000, 4096),
        ("e2e", "the data-to-text pair", 7, 1000, 4096),
        ("word_problems", "word problems", 8, 400, 2048),
    )
)
ADAPTIVE = tuple(
    Experiment(
        f"adaptive-blocks-{config}",
        f"Whether blocks that end where the drafter is unsure are faster than fixed ones, with {what}.",
        "adaptive-blocks",
        races.Race(
            key=f"in-turn-{config}",
            baseline=config,
            runners=tuple(races.Runner(config, size) for size in (*sizes, "adaptive")),
            temperatures=(0.0, 1.0),
            timed=80,
            trials=3,
        ),
    )
    for config, what, sizes in (
        ("demo", "the translation pair", (5, 7, 9)),
        ("e2e", "the data-to-text pair", (5, 7, 9)),
        ("multi30k", "captions", (5, 7, 9)),
    )
)
RIVALS = tuple(
    Experiment(
        f"truncated-rivals-{config.replace('_', '-')}",
        f"Whether a rule is better than the verifier under its best truncation, with {what}.",
        "truncated-rivals",
        sweeps.TradeOff(
            config=config,
            methods=("speculative", "opt", "token_v3"),
            alphas=(0.0, 0.1, 0.3),
            block_sizes=(size,),
            temperatures=(1.0,),
            top_ps=(1.0, 0.3),
            inputs=1000,
            timed=48,
            split="test",
            picture=f"truncated-rivals-{config.replace('_', '-')}",
        ),
    )
    for config, what, size in (
        ("demo", "the translation pair", 5),
        ("e2e", "the data-to-text pair", 7),
        ("e2e_large", "a larger verifier", 12),
        ("multi30k", "captions", 5),
    )
)
PICKS = tuple(
    Experiment(
        f"picks-{config.replace('_', '-')}",
        f"Whether a setting picked on validation keeps its quality and time on the test split, with {what}.",
        "picks",
        sweeps.Picks(
            config=config,
            methods=("speculative", "opt"),
            alphas=(0.0, 0.1, 0.3),
            block_sizes=(size,),
            temperatures=(0.0, 1.0),
            top_ps=(0.3,),
            truncations=(),
            inputs=200,
            timed=48,
        ),
    )
    for config, what, size in (
        ("demo", "the translation pair", 5),
        ("e2e", "the data-to-text pair", 7),
        ("e2e_large", "a larger verifier", 12),
        ("multi30k", "captions", 5),
    )
)
MIXTURES = Experiment(
    "mixtures",
    "Whether a mixture with a learned weight for each position is better than one with a constant weight.",
    "mixtures",
    sweeps.EqualCalls(
        rule="learned_mixture",
        rival="mixture",
        config="demo",
        methods=("mixture", "learned_mixture"),
        alphas=(0.0, 0.3, 0.6, 0.9),
        block_sizes=(5,),
        temperatures=(1.0,),
        top_ps=(1.0, 0.3),
        truncations=(),
        inputs=300,
        split="test",
        changes=(("router", "runs/demo_mixture/mixture.json"),),
    ),
)

PROMPTED: dict[str, Any] = {
    "config": "e2e_gemma",
    "task": "gsm8k",
    "source_length": 2816,
    "new_tokens": 32,
    "rows": 8,
    "temperature": 1.0,
    "dtype": "float32",
    "trials": 3,
}
"""The settings that the experiments on shared beginnings of prompts share."""
SHARED_PROMPTS = Experiment(
    "prefixes-few-shot",
    "How much faster few-shot prompts are decoded if their examples are read once.",
    "prefixes",
    prefixes.FewShot(shots=5, inputs=200, **PROMPTED),
)
CHATS = Experiment(
    "prefixes-chats",
    "How much sooner a chat's first token comes if its earlier turns are not read again.",
    "prefixes",
    prefixes.Chats(shots=(0, 1, 3), timed=16, turns=5, **PROMPTED),
)

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        LOSSLESS_SPEEDS,
        LOSSLESS_BATCHES,
        *LOSSLESS_SHARED,
        WHOLE_RUNS,
        BLOCK_CALLS,
        BLOCK_EXPECTED,
        *BLOCK_TIMES,
        OTHERS,
        QUALITY,
        ARCHITECTURES,
        *TRANSLATION,
        DATA_TO_TEXT,
        PROBLEMS,
        CAPTIONS,
        *RIVALS,
        *PICKS,
        SPANS,
        *LOSSES,
        *ADAPTIVE,
        HIERARCHIES,
        VOCABULARIES,
        BYTES,
        HEADS,
        READERS,
        *QUOTED,
        *LOOKUPS,
        ROUTER,
        PRICED,
        MIXTURES,
        REJECTION,
        SHARED_PROMPTS,
        CHATS,
    )
}
"""The experiments by name."""
