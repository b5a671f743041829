"""Decode texts with a speculative cascade, coloured by the model that wrote each token.

Examples:

    python scripts/decode.py    # the demo: English to German
    python scripts/decode.py --text "Where is he?" --method opt --alpha 0.3
    python scripts/decode.py --config=wmt_small_large --input news.txt.gz \\
        --output news.jsonl
"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.progress import (
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from speccascade_jax import config as configs
from speccascade_jax.cluster import Job, joined
from speccascade_jax.commands.commandline import (
    TRAINED,
    at_least,
    check_summary,
    config_of,
    console,
    exit_code,
    parsed,
    table_of,
    table_of_configs,
)
from speccascade_jax.commands.profiles import check_profile, profiled
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.samplers.named import SINGLE_MODEL
from speccascade_jax.evaluation.coverage import shown
from speccascade_jax.evaluation.rates import summarize
from speccascade_jax.inference.inputs import check_text, read_texts
from speccascade_jax.inference.outputs import (
    check_targets,
    open_output,
    resumed_by,
    settings_file,
    write_whole,
)
from speccascade_jax.inference.progress import track
from speccascade_jax.inference.ray_jobs import check_address, cut, finished, read_shards
from speccascade_jax.inference.ray_jobs import decode as on_ray
from speccascade_jax.inference.text import Cascade, Output
from speccascade_jax.inference.vocabulary_checks import check_methods
from speccascade_jax.parallel import decoding_mesh
from speccascade_jax.settings import NAMED
from speccascade_jax.tokenizers.tokenizer import Tokenizer

COLOURS = {"draft": "green", "correction": "bold red", "bonus": "cyan", "model": "default"}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments of the command."""

    run: tyro.conf.OmitArgPrefixes[DecodeConfig]
    config: str = "demo"
    """A config name or path. Its fields are the defaults of the other flags."""
    text: str | None = None
    """The text to decode."""
    input: str | None = None
    """The texts to decode: a .txt file with one text per line, or a .jsonl file with a field `source`,
    optionally gzipped. - reads standard input. Default: the config's examples."""
    output: str | None = None
    """The .jsonl file to write. If it exists, decoding resumes where it ends."""
    summary: str | None = None
    """A JSON file to write the run's figures to."""
    limit: int | None = None
    """The number of inputs to decode, from the first one on. Default: all."""
    cluster: str | None = None
    """Decode on the devices of several processes: `auto` on TPU pods and Slurm, otherwise
    HOST:PORT,PROCESSES,NUMBER in each process. The first process reads, writes and prints."""
    ray: str | None = None
    """Decode on the Ray cluster at this address, or `local` for this machine. --input may then be a pattern
    such as 'news-*.txt', and --output is a folder."""
    ray_workers: int | None = None
    """With --ray: the number of decoding processes. Default: one per machine."""
    shard_size: int = 256
    """With --ray: the number of inputs per file of --output."""
    precompile: bool = False
    """Compile all programs for these settings, cache them for later runs, and exit."""
    profile: str | None = None
    """A new folder for a trace of the run, which XProf, TensorBoard and Perfetto can open."""
    list: Annotated[bool, tyro.conf.arg(name="list")] = False
    """List all configs and methods, and exit."""


def print_list(screen: Console) -> None:
    screen.print(table_of_configs(DecodeConfig, "--config of decode and the other commands"))
    screen.print(table_of_configs(TRAINED, "--config of finetune"))
    table = Table("method", "target distribution", "alpha", title="--method", title_justify="left")
    for name, entry in NAMED.items():
        table.add_row(name, entry.summary, f"{entry.low} .. {entry.high}" if entry.low > -math.inf else "")
    screen.print(table)


def read_inputs(arguments: Arguments) -> Sequence[str]:
    if arguments.text is not None and arguments.input is not None:
        raise FieldError("text", arguments.text, "give one of them.", "--text and --input exclude each other")
    if arguments.text is not None:
        return [check_text(arguments.text, "--text")]
    if arguments.input is not None:
        return read_texts(arguments.input, arguments.limit)
    if not arguments.run.examples:
        raise FieldError(
            "input", None, "give --text or --input.", f"config {arguments.config} has no examples"
        )
    return arguments.run.examples


def checked_inputs(arguments: Arguments) -> list[str]:
    """The texts to decode. Raises ValueError if they, or the output files, cannot be used."""
    texts = [*read_inputs(arguments)[: arguments.limit]]
    check_paths(arguments)
    check_profile(arguments.profile)
    return texts


def check_paths(arguments: Arguments) -> None:
    """Raises ValueError if an output file cannot be written, or would replace another file."""
    output, summary, run = arguments.output, arguments.summary, arguments.run
    config = configs.path_of(arguments.config)
    check_targets(
        {
            "--output": output,
            "the settings of --output": None if output is None else settings_file(output),
            "--summary": summary,
        },
        {
            "--input": None if arguments.input == "-" else arguments.input,
            "--config": config,
            **run.files,
        },
    )
    check_summary(summary, "resumed_from")


def coloured(output: Output, tokenizer: Tokenizer) -> Text:
    """The text, with each token in the colour of the model that wrote it."""
    line, shown = Text(), ""
    for n, origin in enumerate(output.origin, 1):
        text = tokenizer.decode(output.tokens[:n])
        if not text.startswith(shown) or text.endswith("\N{REPLACEMENT CHARACTER}"):
            continue  # an unfinished character: shown with the byte that completes it
        line.append(text[len(shown) :], style=COLOURS[origin])
        shown = text
    return line


def with_progress(outputs: Iterator[Output], done: int, total: int) -> Iterator[Output]:
    errors = console(stderr=True, quiet=jax.process_index() > 0)
    if not errors.is_terminal:
        yield from track(outputs, "decoding", total, completed=done, console=errors)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("decoding"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("decoding", total=total, completed=done, rate="compiling")
        began, tokens = time.monotonic(), 0
        for output in outputs:
            tokens += len(output.tokens)
            rate = f"{tokens / (time.monotonic() - began):.0f} tokens/s"
            progress.update(task, advance=1, rate=rate)
            yield output


def show(output: Output, tokenizer: Tokenizer, screen: Console) -> None:
    screen.print(Text(output.source, style="dim"))
    screen.print(coloured(output, tokenizer), soft_wrap=True)
    screen.print()


def summary_of(
    run: DecodeConfig, outputs: Sequence[Output], resumed: int, cascade: Cascade
) -> dict[str, Any]:
    """The figures of a run; the first `resumed` outputs are from an earlier run."""
    summary: dict[str, Any] = summarize([output.counts for output in outputs])
    if not run.defers:
        summary["deferral_rate"] = None
    seconds, tokens = cascade.clock.decode_seconds, sum(len(output.tokens) for output in outputs[resumed:])
    return summary | {
        "inputs": len(outputs),
        "resumed_from": resumed,
        "truncated": sum(output.truncated for output in outputs),
        "tokens_per_second": tokens / seconds if seconds else None,
        "decode_seconds": seconds,
        "compile_seconds": cascade.clock.compile_seconds,
    }


def precompile(run: DecodeConfig, cascade: Cascade, screen: Console) -> None:
    cascade.precompile(run.settings, batch_size=run.batch_size)
    screen.print(
        f"compiled {cascade.clock.compilations} programs in {cascade.clock.compile_seconds:.1f} s; cached in "
        f"{jax.config.values['jax_compilation_cache_dir']}"
    )


def decode(arguments: Arguments) -> None:
    run, screen = arguments.run, console()
    if arguments.list:
        print_list(screen)
        return
    run.check()
    at_least(1, limit=arguments.limit)
    check_methods(run, [run.settings])
    if arguments.profile is not None and (arguments.ray is not None or arguments.precompile):
        raise FieldError(
            "profile",
            arguments.profile,
            "leave out one of the two.",
            "--profile traces the decoding of this process, not --ray or --precompile",
        )
    if arguments.ray is not None:
        if arguments.cluster is not None:
            raise FieldError("ray", arguments.ray, "give one.", "--ray and --cluster exclude each other")
        decode_on_ray(arguments, arguments.ray)
        return
    with joined(arguments.cluster) as job:
        decode_with(job, arguments)


def decode_with(job: Job, arguments: Arguments) -> None:
    """Decodes the inputs of the first process on the devices of all; the first process writes the outputs."""
    run, screen = arguments.run.on_this_machine(), console(quiet=not job.first)
    job.agree(settings_of(run))
    mesh = decoding_mesh(run.tensor_parallel, run.batch_size > 1)
    if arguments.precompile:
        precompile(run, Cascade.from_config(run, mesh), screen)
        return
    with contextlib.ExitStack() as stack:
        texts = job.share(partial(checked_inputs, arguments))
        path = arguments.output
        opened = None if path is None else partial(open_output, path, settings_of(run), texts)
        file, outputs, resumed = resumed_by(job, stack, opened)
        cascade = Cascade.from_config(run, mesh)
        if not run.truncate:  # better now than after hours of decoding
            cascade.encode(texts)
        stack.enter_context(profiled(arguments.profile if job.first else None))
        fresh = cascade.generate(
            texts[resumed:],
            run.settings,
            truncate=run.truncate,
            first_index=resumed,
            batch_size=run.batch_size,
        )
        for output in with_progress(fresh, resumed, len(texts)):
            outputs.append(output)
            if file is None:
                show(output, cascade.tokenizer, screen)
            else:
                file.add(dataclasses.asdict(output))
        if not job.first:
            return
        if file is None and run.name not in SINGLE_MODEL:
            screen.print(
                Text.assemble(
                    "written by: ",
                    *(
                        part
                        for name in ("draft", "correction", "bonus")
                        for part in ((name, COLOURS[name]), "  ")
                    ),
                )
            )
        summary = summary_of(run, outputs, resumed, cascade) | shown(cascade, outputs)
        title = f"{run.name}, alpha {run.alpha}, block size {run.block_size}, temperature {run.temperature}"
        screen.print(table_of(summary, title))
        if arguments.summary is not None:
            write_whole(arguments.summary, json.dumps(summary, indent=1) + "\n")


def decode_on_ray(arguments: Arguments, address: str) -> None:
    """Writes --output/part-00000.jsonl and so on; complete files are kept."""
    run, screen = arguments.run, console()
    at_least(1, shard_size=arguments.shard_size, ray_workers=arguments.ray_workers)
    if arguments.input is None or arguments.output is None or arguments.summary is not None:
        raise FieldError(
            "ray",
            address,
            "give both, and leave --summary out.",
            "--ray needs --input and --output, and does not support --summary",
        )
    check_address(address)
    texts = read_shards(arguments.input, arguments.limit)
    settings = settings_of(run)
    shards = cut(texts, arguments.shard_size, arguments.output)
    todo = [shard for shard in shards if finished(shard, settings) is None]
    screen.print(f"{len(shards)} shards, {len(shards) - len(todo)} of them already complete", soft_wrap=True)
    if not todo:
        return
    for number, first in enumerate(on_ray(address, arguments.ray_workers, run, settings, todo), 1):
        screen.print(f"{number} of {len(todo)}: inputs from number {first}", soft_wrap=True)


def settings_of(run: DecodeConfig) -> dict[str, Any]:
    """The settings and inputs that determine the lines of an output."""
    return run.record("missing", "examples")


def parse(argv: list[str]) -> Arguments:
    """The arguments; the fields of --config are their defaults."""
    name, run = config_of(argv, DecodeConfig, "demo")
    return parsed(Arguments, argv, "decode", __doc__, Arguments(run, config=name))


def main(argv: list[str]) -> int:
    return exit_code(lambda: decode(parse(argv)), "; the same command resumes where --output ends")
