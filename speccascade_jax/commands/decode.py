"""Decode texts with a speculative cascade.

    python scripts/decode.py                                    # the demo: English to German
    python scripts/decode.py --text "Where is the station?" --method token_v3 --alpha 0.3
    python scripts/decode.py --config=wmt_small_large --input news.txt.gz --output news.jsonl
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from speccascade_jax import config as configs
from speccascade_jax.commands.commandline import config_of, exit_code, table_of
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.baselines import BASELINES
from speccascade_jax.core.methods import SINGLE_MODEL
from speccascade_jax.core.metrics import summarize
from speccascade_jax.core.rules import METHODS
from speccascade_jax.inference.inputs import read_lines
from speccascade_jax.inference.outputs import open_output, writable
from speccascade_jax.inference.text import Cascade, Output
from speccascade_jax.inference.tokenizer import Tokenizer
from speccascade_jax.parallel import local_mesh

COLOURS = {"draft": "green", "correction": "bold red", "bonus": "cyan", "model": "default"}
errors = Console(stderr=True, highlight=False)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Translate, summarise or continue texts with a small drafter and a large verifier."""

    run: tyro.conf.OmitArgPrefixes[DecodeConfig]
    config: str = "demo"
    """A name in configs/ or the path of such a file; its fields are the defaults of all other flags."""
    text: str | None = None
    """Decode this one text."""
    input: str | None = None
    """Decode this file: .txt (a line each), .jsonl (field `source`), either gzipped; - for stdin."""
    output: str | None = None
    """Write JSON lines here; where the file exists, go on where it ends."""
    summary: str | None = None
    """Write the figures of the run to this JSON file."""
    limit: int | None = None
    """Decode only the first so many inputs."""
    precompile: bool = False
    """Compile all programs of these settings, keep them for later runs, and stop."""
    list: Annotated[bool, tyro.conf.arg(name="list")] = False
    """List configs and methods, and stop."""


def print_list(console: Console) -> None:
    table = Table("config", "what it is", title="--config", title_justify="left")
    for name, path in configs.available().items():
        if isinstance(configs.load(name), DecodeConfig):
            table.add_row(name, path.read_text().split('"""')[1].split("\n")[0])
    console.print(table)
    table = Table("method", "target distribution", "alpha", title="--method", title_justify="left")
    for name, method in METHODS.items():
        table.add_row(name, method.summary, f"{method.low} .. {method.high}")
    for name, baseline in BASELINES.items():
        table.add_row(name, baseline.summary, f"{baseline.low} .. {baseline.high}")
    for name, what in SINGLE_MODEL.items():
        table.add_row(name, what, "")
    console.print(table)


def read_inputs(arguments: Arguments) -> list[str]:
    if arguments.text is not None and arguments.input is not None:
        raise ValueError("--text and --input exclude each other: give one.")
    if arguments.text is not None:
        return [arguments.text]
    if arguments.input is None:
        if not arguments.run.examples:
            raise ValueError(f"config {arguments.config} has no examples of its own: give --text or --input.")
        return list(arguments.run.examples)
    if arguments.input == "-":
        lines = read_lines("stdin", sys.stdin.buffer.read())
    else:
        lines = read_lines(arguments.input)
    if not arguments.input.removesuffix(".gz").endswith(".jsonl"):
        return lines
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            texts.append(json.loads(line)["source"])
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(
                f"{arguments.input}, line {number}: not a JSON object with a `source`.") from None
    return texts


def coloured(output: Output, tokenizer: Tokenizer) -> Text:
    """The text, each token in the colour of who wrote it."""
    line, shown = Text(), ""
    for n, origin in enumerate(output.origin, 1):
        text = tokenizer.decode(output.tokens[:n])
        if not text.startswith(shown) or text.endswith("\N{REPLACEMENT CHARACTER}"):
            continue  # an unfinished character: shown with the byte that completes it
        line.append(text[len(shown):], style=COLOURS[origin])
        shown = text
    return line


def with_progress(outputs: Iterator[Output], done: int, total: int) -> Iterator[Output]:
    columns = (SpinnerColumn(), TextColumn("decoding"), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[rate]}"))
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("decoding", total=total, completed=done, rate="compiling")
        began, tokens = time.monotonic(), 0
        for output in outputs:
            tokens += len(output.tokens)
            rate = f"{tokens / (time.monotonic() - began):.0f} tokens/s"
            progress.update(task, advance=1, rate=rate)
            yield output


def decode(arguments: Arguments) -> None:
    run, console = arguments.run, Console(highlight=False)
    if arguments.list:
        print_list(console)
        return
    mesh = local_mesh() if run.batch_size > 1 and run.tensor_parallel == 1 else None
    if arguments.precompile:
        cascade = Cascade.from_config(run, mesh)
        cascade.precompile(method=run.method, block_size=run.block_size, temperature=run.temperature,
                           top_k=run.top_k, top_p=run.top_p, batch_size=run.batch_size)
        console.print(f"{cascade.clock.compilations} programs, {cascade.clock.compile_seconds:.1f} s; kept "
                      f"in {jax.config.values['jax_compilation_cache_dir']}")
        return
    texts = read_inputs(arguments)[:arguments.limit]
    if arguments.summary is not None:  # better now than after hours of decoding
        writable(Path(arguments.summary))
    with contextlib.ExitStack() as stack:
        file, finished = None, []
        if arguments.output is not None:
            settings = {k: v for k, v in dataclasses.asdict(run).items() if k not in ("missing", "examples")}
            file, finished = open_output(Path(arguments.output), settings, texts)
            stack.enter_context(file)
        cascade = Cascade.from_config(run, mesh)
        outputs = cascade.generate(
            texts[len(finished):], method=run.method, alpha=run.alpha, block_size=run.block_size,
            temperature=run.temperature, top_k=run.top_k, top_p=run.top_p, seed=run.seed,
            batch_size=run.batch_size, truncate=run.truncate, first_index=len(finished))
        fresh = []
        for output in with_progress(outputs, len(finished), len(texts)):
            fresh.append(output)
            if file is None:
                console.print(Text(output.source, style="dim"))
                console.print(coloured(output, cascade.tokenizer), soft_wrap=True)
                console.print()
            else:
                file.write(json.dumps(dataclasses.asdict(output), ensure_ascii=False) + "\n")
                file.flush()
        if file is None and run.method not in SINGLE_MODEL:
            console.print(Text.assemble("written by: ", *(part for name in ("draft", "correction", "bonus")
                                                          for part in ((name, COLOURS[name]), "  "))))
        summary: dict[str, Any] = summarize([o.counts for o in [*finished, *fresh]])
        if run.method in METHODS and not METHODS[run.method].defers:
            summary["deferral_rate"] = None
        seconds = cascade.clock.decode_seconds
        summary |= {
            "inputs": len(texts), "resumed_from": len(finished),
            "truncated": sum(o.truncated for o in [*finished, *fresh]),
            "tokens_per_second": sum(len(o.tokens) for o in fresh) / seconds if seconds else None,
            "decode_seconds": seconds, "compile_seconds": cascade.clock.compile_seconds}
        title = f"{run.method}, alpha {run.alpha}, gamma {run.block_size}, temperature {run.temperature}"
        console.print(table_of(summary, title))
        if arguments.summary is not None:
            Path(arguments.summary).write_text(json.dumps(summary, indent=1) + "\n")


def parse(argv: list[str]) -> Arguments:
    """The command line over the fields of its --config."""
    name, run = config_of(argv, DecodeConfig, "demo")
    return tyro.cli(Arguments, default=Arguments(run, config=name), args=argv, prog="decode.py",
                    description=__doc__)


def main(argv: list[str]) -> int:
    return exit_code(lambda: decode(parse(argv)), "; the same command goes on where --output ends")
