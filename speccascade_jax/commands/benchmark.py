"""What a cascade costs: its parts, and whole decodings against the verifier alone and other libraries.

    python scripts/benchmark.py                                      # parts of a round, the demo's weights
    python scripts/benchmark.py --preset t5_1_1_small t5_1_1_large   # random weights of these sizes
    python scripts/benchmark.py --input ../shared/data/tatoeba_en_de/test.jsonl.gz --join 4 --vs hf

With --input every contestant decodes every input, in turn, one at a time; inputs whose verifier output is
shorter than --min-tokens are left out. Compilation comes first and is not timed.
"""

import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from rich.console import Console
from rich.progress import track

from speccascade_jax import checkpoints
from speccascade_jax import config as configs
from speccascade_jax.checkpoints import Checkpoint
from speccascade_jax.checkpoints.arrays import Placement, to_params
from speccascade_jax.commands.commandline import exit_code, table_of
from speccascade_jax.config import DecodeConfig, Task, dtype_of
from speccascade_jax.core import decoding
from speccascade_jax.core.decoding import Autoregressive, Speculative
from speccascade_jax.core.methods import check_sampling
from speccascade_jax.core.metrics import (
    expected_tokens_per_call,
    position_acceptance,
    relative_cost,
    summarize,
)
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.typing import SamplingOptions
from speccascade_jax.evaluation import other_libraries as peers
from speccascade_jax.evaluation import profiling as parts
from speccascade_jax.inference.text import Cascade, Output
from speccascade_jax.inference.tokenizer import Tokenizer
from speccascade_jax.models.quantization import wants_packing
from speccascade_jax.models.t5 import PRESETS, T5Model
from speccascade_jax.training.data import joined_examples


@dataclasses.dataclass(frozen=True)
class Arguments:
    config: str = "demo"
    """A name in configs/ or the path of such a file."""
    preset: tuple[str, str] | None = None
    """Two T5 presets, drafter and verifier, with random weights in place of the config's."""
    input: str | None = None
    """Decode these: .jsonl with a field `source`, gzipped or not. Without it the parts are timed."""
    vs: tuple[Literal["hf", "ctranslate2"], ...] = ()
    """Other libraries that decode the same inputs with the same weights, in the same turns; with --preset,
    --tokens tokens with each of the two models alone."""
    tokens: int = 80
    """Tokens that each contestant writes for --preset with --vs."""
    repetitions: int = 5
    """Times each of them does."""
    join: int = 1
    """One to this many inputs are joined into one, at random, as the demo pair was trained."""
    limit: int = 300
    """Inputs to read."""
    min_tokens: int = 20
    """Shortest verifier output that counts."""
    method: str = "speculative"
    """The method that is timed."""
    alpha: float = 0.0
    """Its lenience."""
    block_sizes: tuple[int, ...] = (5,)
    """The gammas to time."""
    batch_sizes: tuple[int, ...] = (1,)
    """Rows side by side, for the parts."""
    temperature: float = 0.0
    """0 is greedy."""
    dtype: str | None = None
    """Of weights and products: float32, bfloat16 or int8 (the config's own; with --preset float32)."""
    output: str | None = None
    """Append one JSON line for each figure here."""


class Report:
    """Tables for people; the same figures as JSON lines, each with what it was measured on."""

    def __init__(self, arguments: Arguments, dtype: str):
        self.console, self.path = Console(highlight=False), arguments.output
        folder = Path(__file__).parent
        try:
            commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True,
                                    text=True).stdout.strip()
        except OSError:
            commit = ""
        self.stamp = {"device": jax.devices()[0].device_kind, "machine": platform.machine(),
                      "threads": os.cpu_count(), "dtype": dtype, "jax": jax.__version__, "commit": commit,
                      "date": datetime.date.today().isoformat(), "command": " ".join(sys.argv)}
        self.console.print(table_of({k: v for k, v in self.stamp.items() if k != "command"}, "measured on"))

    def table(self, title: str, figures: dict[str, Any]) -> None:
        self.console.print(table_of(figures, title))
        if self.path is not None:
            with Path(self.path).open("a") as file:
                for name, value in figures.items():
                    line = {"of": title, "figure": name, "value": value, **self.stamp}
                    file.write(json.dumps(line) + "\n")


def quartiles(values: list[float]) -> str:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.2f} ({low:.2f} .. {high:.2f})"


def random_model(name: str) -> Checkpoint:
    """A T5 of a preset's size with random weights, float32."""
    model = T5Model(PRESETS[name])
    return Checkpoint(model, jax.jit(lambda: model.init(0))(), None, name)


def as_decoded(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """A float32 checkpoint as it would be loaded to decode in `dtype`."""
    arrays = ((path, checkpoint.path, np.asarray(x)) for path, x in nnx.to_flat_state(checkpoint.params))
    model = checkpoints.model_for(checkpoint.model.config, dtype)
    params = to_params(model, arrays, Placement(dtype, packed=wants_packing(dtype)))
    return checkpoint._replace(model=model, params=params)


def time_parts(arguments: Arguments, run: DecodeConfig, report: Report, models: Sequence[Any],
               params: tuple[Any, Any]) -> None:
    bandwidth = [parts.read_bandwidth()]
    options = SamplingOptions(arguments.temperature)
    shape = {"source_length": run.max_source_length, "max_new_tokens": run.max_new_tokens}
    for batch_size in arguments.batch_sizes:
        for gamma in arguments.block_sizes:
            found = parts.measure(*models, params, METHODS[arguments.method], block_size=gamma,
                                  batch_size=batch_size, alpha=arguments.alpha, options=options, **shape)
            middle = {name: timing.median for name, timing in found.items()}
            read = {f"{name} step": parts.bytes_read(model, own)
                    for name, model, own in zip(("drafter", "verifier"), models, params, strict=True)}
            bandwidth.append(parts.read_bandwidth())
            best = max(bandwidth)
            figures: dict[str, Any] = {
                f"{name}, ms": quartiles([1e3 * t for t in timing]) for name, timing in found.items()}
            figures |= {"read bandwidth, GB/s": best / 1e9}
            for name, size in read.items():
                figures[f"{name}: MB read, GB/s, share of the bandwidth"] = (
                    f"{size / 1e6:.1f}, {size / middle[name] / 1e9:.1f}, {size / middle[name] / best:.0%}")
            scoring = parts.scoring(gamma)
            figures |= {
                f"{scoring} / verifier step": middle[scoring] / middle["verifier step"],
                "drafter step / verifier step": middle["drafter step"] / middle["verifier step"],
                f"{parts.OVERHEAD}, share of a round": middle[parts.OVERHEAD] / middle["round"]}
            report.table(f"parts, batch {batch_size}, {arguments.method}, gamma {gamma}", figures)
    sampler = Speculative(Autoregressive(models[0]), models[1], METHODS[arguments.method], gamma)
    inputs, lengths = jnp.ones((1, run.max_source_length), jnp.int32), jnp.full(1, run.max_source_length)
    anew, fetched, memory = parts.compilation(
        partial(decoding.generate, sampler, max_new_tokens=run.max_new_tokens, eos_id=1),
        (params, jax.vmap(jax.random.key)(jnp.arange(1)), inputs, lengths, SamplingOptions(jnp.float32(0)),
         jnp.zeros(1)))
    report.table("the whole program, batch 1", {"compile, s": anew, "from the persistent cache, s": fetched,
                                                "memory, weights included, MB": memory / 1e6})


def timed(cascade: Cascade, index: int, text: str, **options) -> tuple[float, Output]:
    before = cascade.clock.decode_seconds
    output = next(iter(cascade.generate([text], first_index=index, **options)))
    return cascade.clock.decode_seconds - before, output


def timed_peer(cascade: Cascade, decode: peers.Decode, index: int, text: str) -> tuple[float, Output]:
    seconds, tokens = decode(cascade.encode([text])[0][0])
    return seconds, Output(index, text, cascade.tokenizer.decode(tokens), tokens, [], {})


def peers_of(arguments: Arguments, run: DecodeConfig, cascade: Cascade) -> dict[str, peers.Decode]:
    """Other libraries' decoders, on float32 exports of the pair."""
    found: dict[str, peers.Decode] = {}
    if not arguments.vs:
        return found
    with tempfile.TemporaryDirectory() as folder:
        drafter, verifier = (peers.exported(checkpoints.load(path), Path(folder) / name)
                             for name, path in (("drafter", run.drafter), ("verifier", run.verifier)))
        if "hf" in arguments.vs:
            found |= peers.transformers_decoders(verifier, run.max_new_tokens, drafter=drafter,
                                                 block_size=arguments.block_sizes[0])
        if "ctranslate2" in arguments.vs:
            found |= peers.ctranslate2_decoders(verifier, cascade.tokenizer.pieces(), run.max_new_tokens)
    return found


def time_alone(arguments: Arguments, run: DecodeConfig, report: Report, name: str, dtype: str) -> None:
    """One model of random weights and the same in other libraries, each writing --tokens tokens."""
    whole = random_model(name)
    model, params, _, _ = as_decoded(whole, dtype)
    count, source = arguments.tokens, list(range(3, 33))
    sizes = {"max_new_tokens": count, "min_new_tokens": count}
    program = jax.jit(partial(decoding.generate, Autoregressive(model), max_new_tokens=count,
                              eos_id=decoding.NO_TOKEN))
    inputs = (jax.random.key(0)[None], jnp.array([source]), jnp.array([len(source)]),
              SamplingOptions(jnp.float32(0)), jnp.zeros(0))

    def ours() -> float:
        return parts.timed(lambda: jax.block_until_ready(program(params, *inputs)))

    contestants: dict[str, Callable[[], float]] = {"here": ours}
    tokenizer = checkpoints.load(run.verifier).tokenizer_file()
    with tempfile.TemporaryDirectory() as folder:
        path = peers.exported(whole._replace(tokenizer=tokenizer), Path(folder) / name)
        others: dict[str, peers.Decode] = {}
        if "hf" in arguments.vs:
            others |= peers.transformers_decoders(path, **sizes)
        if "ctranslate2" in arguments.vs:
            pieces = Tokenizer(tokenizer).pieces()
            pieces += [f"<extra_id_{n}>" for n in range(model.vocab_size - len(pieces))]
            others |= peers.ctranslate2_decoders(path, pieces, **sizes)
    contestants |= {other: lambda decode=decode: decode(source)[0] for other, decode in others.items()}
    seconds: dict[str, list[float]] = {other: [] for other in contestants}
    bandwidth = []
    for repetition in track(range(arguments.repetitions + 1), name, transient=True):
        bandwidth.append(parts.read_bandwidth())
        for other, decode in contestants.items():
            spent = decode()
            if repetition:  # the first compiles and warms up
                seconds[other].append(spent)
    figures: dict[str, Any] = {f"{other}, ms a token": quartiles([1e3 * s / count for s in spent])
                               for other, spent in seconds.items()}
    figures |= {f"times as fast as {other}": quartiles([b / a for a, b in zip(
        seconds["here"], seconds[other], strict=True)]) for other in others}
    read, best = parts.bytes_read(model, params) * count, max(bandwidth)
    figures |= {"read bandwidth, GB/s": best / 1e9, "share of it here, prefill included": quartiles(
        [read / s / best for s in seconds["here"]])}
    report.table(f"{name} alone, {count} tokens", figures)


def slope(counts: list[int], widths: list[int], seconds: list[float]) -> float:
    """Seconds a step, by least squares over inputs: what is left after the prefill is taken off, which takes
    longer the wider the padded input."""
    design = np.stack([counts, widths, np.ones(len(counts))], axis=1)
    return float(np.linalg.lstsq(design, np.array(seconds), rcond=None)[0][0])


def time_decodings(arguments: Arguments, run: DecodeConfig, report: Report) -> None:
    assert arguments.input is not None
    cascade = Cascade.from_config(run)
    task = Task(arguments.input, arguments.input, arguments.input, join=arguments.join)
    texts = [source for source, _ in joined_examples(task, arguments.input)][:arguments.limit]
    lengths = list(map(len, cascade.encode(texts, truncate=True)[0]))
    texts = [t for t, n in zip(texts, lengths, strict=True) if n < cascade.max_source_length]
    all_widths = [cascade.bucket(n) for n in lengths if n < cascade.max_source_length]

    sweep = {"temperature": arguments.temperature, "alpha": arguments.alpha}
    options: dict[str, Any] = {
        name: {"method": name, "temperature": arguments.temperature} for name in ("verifier", "drafter")}
    options |= {f"gamma {g}": {"method": arguments.method, "block_size": g, **sweep}
                for g in arguments.block_sizes}
    contestants: dict[str, Callable[[int, str], tuple[float, Output]]] = {
        name: partial(timed, cascade, **chosen) for name, chosen in options.items()}
    others = peers_of(arguments, run, cascade)
    contestants |= {name: partial(timed_peer, cascade, decode) for name, decode in others.items()}
    for decode in track(contestants.values(), "compiling", transient=True):
        for n in {cascade.bucket(len(row)): n for n, row in enumerate(cascade.encode(texts)[0])}.values():
            decode(0, texts[n])

    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    outputs: dict[str, list[Output]] = {name: [] for name in contestants}
    names = list(contestants)
    for index, text in enumerate(track(texts, "timing", transient=True)):
        measured = {}
        for name in names[index % len(names):] + names[:index % len(names)]:  # nobody is always first
            measured[name] = contestants[name](index, text)
        if len(measured["verifier"][1].tokens) >= arguments.min_tokens:
            for name, (spent, output) in measured.items():
                seconds[name].append(spent)
                outputs[name].append(output)

    kept = len(seconds["verifier"])
    if kept < 3:  # what a slope is fitted by
        raise ValueError(f"only {kept} inputs have outputs of {arguments.min_tokens} tokens or more: raise "
                         "--limit or --join.")
    widths = [all_widths[o.index] for o in outputs["verifier"]]
    step = {name: slope([len(o.tokens) for o in outputs[name]], widths, seconds[name])
            for name in ("verifier", "drafter")}
    report.table("one model alone", {
        "inputs": kept,
        "mean verifier output, tokens": float(np.mean([len(o.tokens) for o in outputs["verifier"]])),
        "verifier step, ms": 1e3 * step["verifier"], "drafter step, ms": 1e3 * step["drafter"],
        "verifier step / drafter step": step["verifier"] / step["drafter"]})

    def faster(name: str, other: str) -> str:
        """How many times as fast as `other`: median and quartiles over inputs."""
        return quartiles([b / a for a, b in zip(seconds[name], seconds[other], strict=True)])

    for gamma in arguments.block_sizes:
        name = f"gamma {gamma}"
        counts = [o.counts for o in outputs[name]]
        rates = summarize(counts)
        round_seconds = slope([c["rounds"] for c in counts], widths, seconds[name])
        acceptance = position_acceptance([o.origin for o in outputs[name]])
        found = parts.measure(
            cascade.drafter, cascade.verifier, (cascade.drafter_params, cascade.verifier_params),
            METHODS[arguments.method], block_size=gamma, batch_size=1, alpha=arguments.alpha,
            options=SamplingOptions(arguments.temperature), max_new_tokens=cascade.max_new_tokens,
            source_length=cascade.bucket(int(np.median(widths))))
        part = {name: timing.median / found["verifier step"].median for name, timing in found.items()}
        beyond = part[parts.scoring(gamma)] - 1 + part[parts.OVERHEAD]
        if METHODS[arguments.method].lossless:  # its drafter does not read its last token
            beyond -= part["drafter step"]
        predicted, with_parts = (relative_cost(acceptance, gamma, part["drafter step"], overhead)
                                 for overhead in (0.0, beyond))
        figures = {
            "times as fast as the verifier alone": faster(name, "verifier"),
            **{f"as {other}": faster(name, other) for other in others},
            "ms an input, median": 1e3 * float(np.median(seconds[name])),
            "acceptance_rate": rates["acceptance_rate"], "acceptance a tested position": acceptance,
            "tokens_per_verifier_call": rates["tokens_per_verifier_call"],
            "round, ms": 1e3 * round_seconds,
            "relative cost without prefill, measured":
                round_seconds / rates["tokens_per_verifier_call"] / step["verifier"],
            "predicted, a scoring call as one step": predicted,
            f"predicted, with {parts.scoring(gamma)} and the rules as timed": with_parts,
            "the same, by the tokens a call as counted":  # ends of texts and dependent acceptances apart
                with_parts * expected_tokens_per_call(acceptance, gamma) / rates["tokens_per_verifier_call"],
            "and with whole rounds as timed":  # what both models in one round cost beside their parts
                part["round"] / rates["tokens_per_verifier_call"]}
        report.table(f"{arguments.method}, {name}, temperature {arguments.temperature}", figures)
    if others:
        report.table("the verifier alone here", {f"times as fast as {other}": faster("verifier", other)
                                                 for other in others})
        same = {other: np.mean([a.tokens == b.tokens for a, b in zip(outputs[other], outputs["verifier"],
                                                                     strict=True)]) for other in others}
        report.table("outputs equal to the verifier's here", {k: f"{v:.1%}" for k, v in same.items()})


def benchmark(arguments: Arguments) -> None:
    if arguments.vs and arguments.input is None and arguments.preset is None:
        raise ValueError("--vs compares whole decodings: give inputs with --input, or sizes with --preset.")
    if arguments.preset is not None and arguments.input is not None:
        raise ValueError("random weights write nothing worth timing: give --preset or --input.")
    peers.check_installed(arguments.vs)
    if arguments.tokens < 1 or arguments.repetitions < 1:
        raise ValueError("--tokens and --repetitions must be at least 1.")
    if arguments.method not in METHODS:
        raise ValueError(f"unknown method {arguments.method!r}; known: {', '.join(METHODS)}.")
    run = configs.load(arguments.config)
    if not isinstance(run, DecodeConfig):
        raise ValueError(f"config {arguments.config} is none of scripts/decode.py's.")
    run = dataclasses.replace(run, dtype=arguments.dtype or run.dtype)
    for gamma in arguments.block_sizes:
        check_sampling(arguments.method, arguments.alpha, gamma, SamplingOptions(arguments.temperature), 2)
    if arguments.preset is not None:
        for name in arguments.preset:
            if name not in PRESETS:
                raise ValueError(f"unknown preset {name!r}: {', '.join(PRESETS)}.")
        dtype = dtype_of(run if arguments.dtype else dataclasses.replace(run, dtype="float32"))
        report = Report(arguments, dtype)
        if arguments.vs:
            for name in arguments.preset:
                time_alone(arguments, run, report, name, dtype)
            return
        small, large = (as_decoded(random_model(name), dtype) for name in arguments.preset)
        time_parts(arguments, run, report, (small.model, large.model), (small.params, large.params))
        return
    cascade = Cascade.from_config(run)
    report = Report(arguments, cascade.verifier.dtype)
    if arguments.input is None:
        time_parts(arguments, run, report, (cascade.drafter, cascade.verifier),
                   (cascade.drafter_params, cascade.verifier_params))
    else:
        time_decodings(arguments, run, report)


def main(argv: list[str]) -> int:
    return exit_code(lambda: benchmark(tyro.cli(Arguments, args=argv, prog="benchmark.py",
                                                description=__doc__)))
