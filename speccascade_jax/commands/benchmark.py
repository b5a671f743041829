"""Times the parts of a cascade, and whole decodings against the verifier alone and other libraries.

    python scripts/benchmark.py    # the parts of a round of the demo pair
    python scripts/benchmark.py --preset t5_1_1_small t5_1_1_large
    python scripts/benchmark.py --input sentences.jsonl --join 4 --vs hf
    python scripts/benchmark.py --tpu=v5e:2x2 --config=wmt_small_large

With --preset, the weights are random. With --tpu, programs are compiled for TPUs, which need not be present.
With --input, all decoders take turns on every input, one input at a time; inputs whose verifier output is
shorter than --min-tokens are skipped. Compilation is not timed.
"""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax import checkpoints
from speccascade_jax import config as configs
from speccascade_jax.checkpoints.families import PRESETS
from speccascade_jax.cluster import Job, joined
from speccascade_jax.commands import compiling
from speccascade_jax.commands.commandline import at_least, at_most, exit_code, flag_of, parsed
from speccascade_jax.commands.reporting import Report
from speccascade_jax.config import DecodeConfig, Task, dtype_of
from speccascade_jax.core import loop
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.protocols import NO_TOKEN
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.samplers.block import drafting
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.core.verification import TOKEN, VERIFICATIONS
from speccascade_jax.evaluation import other_libraries, profiling
from speccascade_jax.evaluation.profiling import Contestant, slope
from speccascade_jax.evaluation.rates import position_acceptance, relative_cost, summarize
from speccascade_jax.inference.outputs import check_targets
from speccascade_jax.inference.progress import track
from speccascade_jax.inference.text import Cascade, Output
from speccascade_jax.inference.vocabulary_checks import check_methods
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.parallel import decoding_mesh
from speccascade_jax.planning.prediction import expected_tokens
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.tokenizer import Tokenizer
from speccascade_jax.training.data import joined_examples
from speccascade_jax.vocabularies import Vocabulary


@dataclasses.dataclass(frozen=True)
class Arguments:
    config: str = "demo"
    """A config name or path."""
    preset: tuple[str, str] | None = None
    """Two presets, drafter and verifier, with random weights, instead of the config's models."""
    tpu: str | None = None
    """Compile for these chips (for example v5e:2x2) with the TPU compiler, and report each program's memory,
    the bytes it reads, and any unwanted copies or transfers. This needs no TPU, runs nothing and reads no
    weights."""
    tensor_parallel: tuple[int, ...] = ()
    """With --tpu or --cluster: the number of chips or devices that share each model's parameters. Default:
    the config's."""
    cluster: str | None = None
    """Time --input on the devices of several processes: `auto` on TPU pods and Slurm, otherwise
    HOST:PORT,PROCESSES,NUMBER in each process. The first process reads and prints."""
    source_length: tuple[int, ...] = ()
    """With --tpu: source lengths in tokens; each one is compiled. Default: the config's."""
    new_tokens: int | None = None
    """With --tpu: the output length in tokens. Default: the config's."""
    acceptance: float = 0.8
    """With --tpu: the assumed acceptance probability, used to bound the time per token."""
    input: str | None = None
    """A .jsonl file, optionally gzipped, with a field `source`: decode these inputs. Default: time the parts
    of a round."""
    vs: tuple[Literal["hf", "ctranslate2"], ...] = ()
    """Other libraries that decode the same inputs with the same weights, in turn. With --preset, they decode
    --tokens tokens with each of the two models alone."""
    tokens: int = 80
    """With --preset and --vs: the number of tokens that each decoder writes."""
    repetitions: int = 5
    """With --preset and --vs: the number of times that each decoder decodes."""
    join: int = 1
    """Join between one and this many random inputs into one, as in the training of the demo pair."""
    limit: int = 300
    """The number of inputs to read."""
    min_tokens: int = 20
    """Skip inputs whose verifier output has fewer tokens than this."""
    method: str = "speculative"
    """The method to time."""
    alpha: float = 0.0
    """The lenience of the method."""
    verification: str = TOKEN.name
    """How drafts are verified: token or block (see the decode command)."""
    block_sizes: tuple[int, ...] = (5,)
    """The block sizes to time."""
    batch_sizes: tuple[int, ...] = (1,)
    """The batch sizes to time the parts at."""
    temperature: float = 0.0
    """The sampling temperature. 0 decodes greedily."""
    vocabulary: Vocabulary | None = None
    """How a drafter with another vocabulary drafts. Default: the config's."""
    dtype: str | None = None
    """The dtype of weights and matrix products: float32, bfloat16 or int8. Default: the config's, or float32
    with --preset."""
    output: str | None = None
    """A .jsonl file to which one line per figure is appended."""


def quartiles(values: Sequence[float]) -> str:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.2f} ({low:.2f} .. {high:.2f})"


def ratios(above: Sequence[float], below: Sequence[float]) -> str:
    return quartiles([a / b for a, b in zip(above, below, strict=True)])


def time_parts(
    arguments: Arguments, run: DecodeConfig, report: Report, models: tuple[Any, Any], params: tuple[Any, Any]
) -> None:
    """Prints the times of a round's parts, in a table for each batch size and block size, and the compile
    times of the whole program."""
    drafter, verifier = models
    bandwidth = [profiling.read_bandwidth()]
    for batch_size in arguments.batch_sizes:
        for block_size in arguments.block_sizes:
            timings = profiling.measure(
                drafter,
                verifier,
                params,
                METHODS[arguments.method],
                verification=VERIFICATIONS[arguments.verification],
                block_size=block_size,
                batch_size=batch_size,
                alpha=arguments.alpha,
                temperature=arguments.temperature,
                source_length=run.max_source_length,
                max_new_tokens=run.max_new_tokens,
            )
            middle = {name: timing.median for name, timing in timings.items()}
            read = {
                f"{name} step": profiling.bytes_read(model, weights)
                for name, model, weights in zip(("drafter", "verifier"), models, params, strict=True)
            }
            bandwidth.append(profiling.read_bandwidth())
            best = max(bandwidth)
            figures: dict[str, Any] = {
                f"{name}, ms": f"{1e3 * t.median:.2f} ({1e3 * t.low:.2f} .. {1e3 * t.high:.2f})"
                for name, t in timings.items()
            }
            figures |= {"read bandwidth, GB/s": best / 1e9}
            for name, size in read.items():
                figures[f"{name}: MB read, GB/s, share of the bandwidth"] = (
                    f"{size / 1e6:.1f}, {size / middle[name] / 1e9:.1f}, {size / middle[name] / best:.0%}"
                )
            scoring = profiling.scoring(block_size)
            figures |= {
                f"{scoring} / verifier step": middle[scoring] / middle["verifier step"],
                "drafter step / verifier step": middle["drafter step"] / middle["verifier step"],
                f"{profiling.OVERHEAD}, share of a round": middle[profiling.OVERHEAD] / middle["round"],
            }
            report.table(f"parts, batch {batch_size}, {arguments.method}, block size {block_size}", figures)
    sampler = Speculative(
        drafting(drafter, arguments.block_sizes[-1]),
        verifier,
        METHODS[arguments.method],
        arguments.block_sizes[-1],
        verification=VERIFICATIONS[arguments.verification],
    )
    inputs, lengths = jnp.ones((1, run.max_source_length), jnp.int32), jnp.full(1, run.max_source_length)
    anew, fetched, memory = profiling.compilation(
        partial(loop.generate, sampler, max_new_tokens=run.max_new_tokens, eos_id=1),
        (params, jax.random.key(0)[None], inputs, lengths, SamplingOptions(jnp.float32(0)), jnp.zeros(1)),
    )
    report.table(
        "the whole program, batch 1",
        {
            "compile, s": anew,
            "from the persistent cache, s": fetched,
            "memory, weights included, MB": memory / 1e6,
        },
    )


def timed(cascade: Cascade, settings: Settings, index: int, text: str) -> tuple[float, Output]:
    before = cascade.clock.decode_seconds
    output = next(iter(cascade.generate([text], settings, first_index=index)))
    return cascade.clock.decode_seconds - before, output


def timed_elsewhere(
    cascade: Cascade, decode: other_libraries.Decode, index: int, text: str
) -> tuple[float, Output]:
    seconds, tokens = decode(cascade.encode([text])[0][0])
    return seconds, Output(index, text, cascade.tokenizer.decode(tokens), tokens, [], {})


def decoders_elsewhere(
    arguments: Arguments, run: DecodeConfig, cascade: Cascade
) -> dict[str, other_libraries.Decode]:
    """The decoders of other libraries, with float32 exports of the pair."""
    return other_libraries.decoders(arguments.vs, run, cascade, arguments.block_sizes[0])


def time_alone(arguments: Arguments, run: DecodeConfig, report: Report, name: str, dtype: str) -> None:
    """Times one model with random weights here and in other libraries, each writing --tokens tokens."""
    whole = profiling.random_model(name, PRESETS[name])
    model, params, _, _ = profiling.as_decoded(whole, dtype)
    count, source = arguments.tokens, list(range(3, 33))
    program = jax.jit(partial(loop.generate, Autoregressive(model), max_new_tokens=count, eos_id=NO_TOKEN))
    inputs = (
        jax.random.key(0)[None],
        jnp.array([source]),
        jnp.array([len(source)]),
        SamplingOptions(jnp.float32(0)),
        jnp.zeros(0),
    )

    def ours(_: list[int]) -> tuple[float, list[int]]:
        return profiling.timed(lambda: jax.block_until_ready(program(params, *inputs))), []

    tokenizer = checkpoints.load(run.verifier).tokenizer_file()
    others: dict[str, other_libraries.Decode] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = other_libraries.exported(whole._replace(tokenizer=tokenizer), Path(folder) / name)
        if "hf" in arguments.vs:
            others |= other_libraries.transformers_decoders(path, count, min_new_tokens=count)
        if "ctranslate2" in arguments.vs:
            pieces = Tokenizer(tokenizer).pieces()
            pieces += [f"<extra_id_{n}>" for n in range(model.vocab_size - len(pieces))]
            others |= other_libraries.ctranslate2_decoders(path, pieces, count, min_new_tokens=count)
    contestants = {"here": ours, **others}
    seconds: dict[str, list[float]] = {other: [] for other in contestants}
    bandwidth = []
    for repetition in track(range(arguments.repetitions + 1), name):
        bandwidth.append(profiling.read_bandwidth())
        for other, decode in contestants.items():
            spent, _ = decode(source)
            if repetition:  # the first compiles and warms up
                seconds[other].append(spent)
    figures: dict[str, Any] = {
        f"{other}, ms per token": quartiles([1e3 * s / count for s in spent])
        for other, spent in seconds.items()
    }
    figures |= {f"times as fast as {other}": ratios(seconds[other], seconds["here"]) for other in others}
    read, best = profiling.bytes_read(model, params) * count, max(bandwidth)
    figures |= {
        "read bandwidth, GB/s": best / 1e9,
        "share of it here, prefill included": quartiles([read / s / best for s in seconds["here"]]),
    }
    report.table(f"{name} alone, {count} tokens", figures)


def read_texts(path: str, join: int, limit: int) -> list[str]:
    task = Task(path, path, path, target_field="source", join=join)  # targets are ignored
    return [source for source, _ in joined_examples(task, path)][:limit]


def with_widths(texts: Sequence[str], cascade: Cascade) -> list[tuple[str, int]]:
    """The texts that fit the cascade, without blank ones, each with its padded width."""
    lengths = map(len, cascade.encode(texts, truncate=True)[0])
    return [
        (text, cascade.bucket(n))
        for text, n in zip(texts, lengths, strict=True)
        if 0 < n < cascade.max_source_length
    ]


def time_decodings(
    arguments: Arguments, run: DecodeConfig, cascade: Cascade, texts: Sequence[str], report: Report
) -> None:
    """Times whole decodings of --input: every block size against the verifier alone and other libraries."""
    inputs = with_widths(texts, cascade)
    block_sizes = (*arguments.block_sizes, *([run.block_size] if isinstance(run.block_size, tuple) else ()))
    alone = ("verifier",) if cascade.looks_up_alone else ("verifier", "drafter")
    others = decoders_elsewhere(arguments, run, cascade)
    contestants: dict[str, Contestant] = {
        name: partial(timed, cascade, chosen)
        for name, chosen in decodings(arguments, run, alone, block_sizes).items()
    }
    contestants |= {name: partial(timed_elsewhere, cascade, decode) for name, decode in others.items()}
    for decode in track(contestants.values(), "compiling"):
        for text in {width: text for text, width in inputs}.values():
            decode(0, text)

    every = profiling.in_turn(contestants, track([text for text, _ in inputs], "timing"))
    kept = long_enough(arguments, every["verifier"])
    seconds = {name: [runs[n][0] for n in kept] for name, runs in every.items()}
    outputs = {name: [runs[n][1] for n in kept] for name, runs in every.items()}
    widths = [inputs[n][1] for n in kept]
    step = {name: slope([len(o.tokens) for o in outputs[name]], widths, seconds[name]) for name in alone}
    report_models(step, outputs["verifier"], report)
    for block_size in block_sizes:
        name = f"block size {block_size}"
        figures = {
            "times as fast as the verifier alone": ratios(seconds["verifier"], seconds[name]),
            **{f"as {other}": ratios(seconds[other], seconds[name]) for other in others},
            "ms per input, median": 1e3 * float(np.median(seconds[name])),
            **rounds_of(
                arguments, cascade, block_size, outputs[name], widths, seconds[name], step["verifier"]
            ),
        }
        report.table(f"{arguments.method}, {name}, temperature {arguments.temperature}", figures)
    if others:
        report_others(list(others), seconds, outputs, report)


def decodings(
    arguments: Arguments, run: DecodeConfig, alone: Sequence[str], block_sizes: Sequence[Any]
) -> dict[str, Settings]:
    """The settings of each model alone and of the method at each block size, by the names in tables."""
    base = Settings(
        temperature=arguments.temperature, hand_over=run.hand_over, verification=arguments.verification
    )
    settings = {name: base.by(name) for name in alone}
    return settings | {
        f"block size {size}": dataclasses.replace(
            base, method=arguments.method, block_size=size, alpha=arguments.alpha
        )
        for size in block_sizes
    }


def long_enough(arguments: Arguments, runs: Sequence[tuple[float, Output]]) -> list[int]:
    """The indices of the inputs whose outputs have --min-tokens. Raises FieldError if they are too few to fit
    a slope."""
    least = arguments.min_tokens
    kept = [n for n, (_, output) in enumerate(runs) if len(output.tokens) >= least]
    if len(kept) < 3:
        raise FieldError(
            "limit",
            arguments.limit,
            "raise --limit or --join.",
            f"only {len(kept)} inputs have outputs of at least {least} tokens",
        )
    return kept


def report_models(step: Mapping[str, float], outputs: Sequence[Output], report: Report) -> None:
    """Reports the seconds of a step of each model, and the verifier's outputs."""
    figures = {
        "inputs": len(outputs),
        "mean verifier output, tokens": float(np.mean([len(o.tokens) for o in outputs])),
        "verifier step, ms": 1e3 * step["verifier"],
    }
    if "drafter" in step:
        figures |= {
            "drafter step, ms": 1e3 * step["drafter"],
            "verifier step / drafter step": step["verifier"] / step["drafter"],
        }
    report.table("one model alone", figures)


def report_others(
    others: Sequence[str],
    seconds: Mapping[str, Sequence[float]],
    outputs: Mapping[str, Sequence[Output]],
    report: Report,
) -> None:
    """Reports other libraries' times, and the number of their outputs that equal the verifier's."""
    report.table(
        "the verifier alone here",
        {f"times as fast as {other}": ratios(seconds[other], seconds["verifier"]) for other in others},
    )
    same = {
        other: np.mean(
            [a.tokens == b.tokens for a, b in zip(outputs[other], outputs["verifier"], strict=True)]
        )
        for other in others
    }
    report.table("outputs equal to the verifier's here", {k: f"{v:.1%}" for k, v in same.items()})


def rounds_of(
    arguments: Arguments,
    cascade: Cascade,
    block_size: Any,
    outputs: Sequence[Output],
    widths: Sequence[int],
    seconds: Sequence[float],
    verifier_step: float,
) -> dict[str, Any]:
    """The cost of a round for one block size, as measured and as predicted from its parts."""
    method = METHODS[arguments.method]
    rates = summarize([o.counts for o in outputs])
    per_call = sum(o.counts["emitted"] for o in outputs) / sum(o.counts["rounds"] for o in outputs)
    round_seconds = slope([o.counts["rounds"] for o in outputs], widths, seconds)
    acceptance = position_acceptance([o.origin for o in outputs])
    counted = {
        "acceptance_rate": rates["acceptance_rate"],
        "acceptance per tested position": acceptance,
        "tokens_per_verifier_call": per_call,
        "round, ms": 1e3 * round_seconds,
        "relative cost without prefill, measured": round_seconds / per_call / verifier_step,
    }
    if cascade.levels > 1:
        return counted | {"levels": rates["levels"]}
    if cascade.foreign or cascade.model_free is not None or cascade.mesh is not None:
        return counted
    timings = profiling.measure(
        cascade.drafter,
        cascade.verifier,
        cascade.params,
        method,
        block_size=block_size,
        batch_size=1,
        alpha=arguments.alpha,
        temperature=arguments.temperature,
        max_new_tokens=cascade.max_new_tokens,
        source_length=cascade.bucket(int(np.median(widths))),
    )
    part = {name: timing.median / timings["verifier step"].median for name, timing in timings.items()}
    beyond = part[profiling.scoring(block_size)] - 1 + part[profiling.OVERHEAD]
    if method.lossless:  # its drafter does not read its last token
        beyond -= part["drafter step"]
    predicted, with_parts = (
        relative_cost(acceptance, block_size, part["drafter step"], overhead) for overhead in (0.0, beyond)
    )
    return counted | {
        "predicted, a scoring call as one step": predicted,
        f"predicted, with {profiling.scoring(block_size)} and the rules as timed": with_parts,
        "the same, with the counted tokens per call":  # ignores ends of texts and dependent acceptances
        with_parts * expected_tokens(acceptance, block_size) / per_call,
        "and with whole rounds as timed":  # includes the extra cost of both models in one round
        part["round"] / per_call,
    }


def check(arguments: Arguments) -> DecodeConfig:
    """The config to measure. Raises ValueError for invalid arguments, before anything is read or written."""
    a = arguments
    if a.vs and a.input is None and a.preset is None:
        raise FieldError(
            "vs", a.vs, "give inputs with --input, or sizes with --preset.", "--vs compares whole decodings"
        )
    if a.preset is not None and a.input is not None:
        raise FieldError(
            "preset",
            a.preset,
            "give --preset or --input.",
            "--input needs trained weights; outputs of random weights say nothing about speed",
        )
    if a.cluster is not None and (a.input is None or a.vs or a.tpu):
        raise FieldError(
            "cluster",
            a.cluster,
            "give --input, and leave --vs and --tpu out.",
            "--cluster times whole decodings",
        )
    if a.tpu is not None:
        compiling.check(a)
    at_least(1, tokens=a.tokens, repetitions=a.repetitions, limit=a.limit, join=a.join)
    at_most(10_000, tokens=a.tokens, repetitions=a.repetitions)
    at_least(0, min_tokens=a.min_tokens)
    run = configs.load(a.config, DecodeConfig)
    for name, values, limit in (
        ("block_sizes", a.block_sizes, run.max_new_tokens),
        ("batch_sizes", a.batch_sizes, 4096),
    ):
        if not values:
            raise FieldError(name, values, "give at least one.", f"{flag_of(name)} is empty")
        at_least(1, **{name: min(values)})
        at_most(limit, **{name: max(values)})
    if a.method not in METHODS:
        raise FieldError("method", a.method, f"known: {', '.join(METHODS)}.", f"unknown method {a.method!r}")
    points = [
        Settings(
            method=a.method,
            alpha=a.alpha,
            block_size=block_size,
            temperature=a.temperature,
            verification=a.verification,
        )
        for block_size in a.block_sizes
    ]
    for point in points:
        point.check(1)
    if a.input is not None:
        check_methods(dataclasses.replace(run, vocabulary=a.vocabulary or run.vocabulary), points)
    if len(run.roles) != 2 and a.preset is None and (a.input is None or a.vs):
        raise FieldError(
            "config",
            a.config,
            "give --input alone, or time each model's calls with scripts/plan.py.",
            f"config {a.config} has {len(run.roles)} models; parts, other libraries and --tpu need two",
        )
    for name in a.preset or ():
        if name not in PRESETS:
            raise FieldError("preset", name, f"known: {', '.join(PRESETS)}.", f"unknown preset {name!r}")
        if a.vs and not isinstance(PRESETS[name], T5Config):
            raise FieldError("vs", a.vs, f"{name} is not a T5.", "--vs compares T5 models only")
    other_libraries.check_installed(a.vs)  # last: invalid arguments need no installation
    read = {"--input": a.input, "--config": configs.path_of(a.config), **run.files}
    check_targets({"--output": a.output}, read)
    return run


def benchmark(arguments: Arguments) -> None:
    run = check(arguments)
    if arguments.tpu is not None:
        shapes = None if arguments.preset is None else [PRESETS[name] for name in arguments.preset]
        compiling.compile_for_tpus(
            arguments, dataclasses.replace(run, dtype=arguments.dtype or run.dtype), shapes
        )
        return
    run = dataclasses.replace(
        run,
        dtype=arguments.dtype or ("float32" if arguments.preset else run.dtype),
        vocabulary=arguments.vocabulary or run.vocabulary,
    )
    with joined(arguments.cluster) as job:
        measure(job, arguments, run)


def measure(job: Job, arguments: Arguments, run: DecodeConfig) -> None:
    """Runs the measurement that the flags select, on the devices of all processes of a job."""
    report = Report(arguments.output, dtype_of(run), quiet=not job.first)
    if arguments.preset is not None and arguments.vs:
        for name in arguments.preset:
            time_alone(arguments, run, report, name, dtype_of(run))
    elif arguments.preset is not None:
        drafter, verifier = (
            profiling.as_decoded(profiling.random_model(name, PRESETS[name]), dtype_of(run))
            for name in arguments.preset
        )
        time_parts(arguments, run, report, (drafter.model, verifier.model), (drafter.params, verifier.params))
    else:
        texts, mesh, path = None, None, arguments.input
        if path is not None:
            texts = job.share(lambda: read_texts(path, arguments.join, arguments.limit))
        if job.processes > 1:
            run = dataclasses.replace(
                run, tensor_parallel=min(arguments.tensor_parallel, default=run.tensor_parallel)
            )
            mesh = decoding_mesh(run.tensor_parallel)
        cascade = Cascade.from_config(run, mesh)
        if cascade.foreign and (texts is None or arguments.vs):
            raise FieldError(
                "config",
                arguments.config,
                "give --input alone.",
                f"config {arguments.config} has a drafter with another vocabulary; parts and other libraries "
                "are only timed for models that share one",
            )
        if cascade.model_free is not None and (texts is None or arguments.vs):
            raise FieldError(
                "config",
                arguments.config,
                "give --input alone.",
                f"config {arguments.config} drafts by {cascade.model_free.name}; parts and other "
                "libraries are only timed for drafters that are models",
            )
        if texts is not None:
            time_decodings(arguments, run, cascade, texts, report)
        else:
            time_parts(arguments, run, report, (cascade.drafter, cascade.verifier), cascade.params)


def main(argv: list[str]) -> int:
    return exit_code(lambda: benchmark(parsed(Arguments, argv, "benchmark", __doc__)))
