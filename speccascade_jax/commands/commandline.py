"""What the scripts share: a config's fields as flags, and how they end."""

import argparse
import ast
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from speccascade_jax import cluster
from speccascade_jax import config as configs
from speccascade_jax.commands import Terminated
from speccascade_jax.config import DecodeConfig, LearnedRuleConfig, Task, TrainConfig
from speccascade_jax.core.errors import FieldError

FLAGS = {
    field.name
    for config in (DecodeConfig, TrainConfig, LearnedRuleConfig)
    for field in dataclasses.fields(config)
}
"""The fields that are flags of some command."""


def config_of(argv: list[str], kind: Any, default: str | None = None) -> tuple[str, Any]:
    """The name after --config in argv (or `default`), and that config, which must be a `kind`.

    Found before the rest of the command line is parsed: its fields are the other flags' defaults. Where only
    --help is asked for, there may be none.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", default=default)
    name = finder.parse_known_args(argv)[0].config
    if name is None:
        if not {"-h", "--help"}.isdisjoint(argv):
            return tyro.MISSING, tyro.MISSING
        raise FieldError(
            "config",
            None,
            f"give --config=NAME, one of: {', '.join(configs.available())}.",
            "--config is missing",
        )
    return name, configs.load(name, kind)


TRAINED = TrainConfig | LearnedRuleConfig
"""What finetune takes."""


def table_of_configs(kind: Any, title: str) -> Table:
    """Every config that is a `kind`, with the first paragraph of its docstring; broken ones, too."""
    table = Table("config", "what it is", title=title, title_justify="left")
    for name, path in configs.available().items():
        try:
            if isinstance(configs.load(path), kind):
                what = ast.get_docstring(ast.parse(path.read_bytes())) or ""
                table.add_row(Text(name), Text(" ".join(what.split("\n\n")[0].split())))
        except ValueError as error:
            table.add_row(Text(name), Text(f"broken: {error}"))
    return table


def keep_compilations() -> None:
    """Compiled programs outlive the process, in $JAX_COMPILATION_CACHE_DIR, else in the user's cache
    directory: the second start of a script compiles nothing."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "speccascade_jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def program(command: str) -> str:
    """What `command` was called as, for its help: a script, or the installed command."""
    script = Path(sys.argv[0]).name
    return script if script == f"{command}.py" else f"speccascade {command}"


def console(**options: Any) -> Console:
    """One that prints every text as it is: names and sentences may hold what Rich takes for markup."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def exit_code(work: Callable[[], None], interrupted: str = "") -> int:
    """work(), and 0; 2 where it raises a ValueError (bad input) or an OSError (a full disk), or where memory
    is too small, said in one sentence; 130 when interrupted, 143 when terminated."""
    keep_compilations()
    for stream in (sys.stdout, sys.stderr):  # a text that the terminal's encoding lacks stops nothing
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    errors = console(stderr=True)
    try:
        work()
        return 0
    except BrokenPipeError:  # the reader of our output has left: `decode.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Terminated:
        errors.print(f"terminated{interrupted}.", soft_wrap=True)
        return cluster.ends(143)
    except KeyboardInterrupt as error:
        errors.print(f"interrupted{error}{interrupted}.", soft_wrap=True)
        return cluster.ends(130)
    except Exception as error:
        said = sentence(error)
        if said is None:
            if cluster.FAILED.is_set():
                traceback.print_exc()
                cluster.ends(1)
            raise
    errors.print(f"error: {said}", style="red", soft_wrap=True)
    return cluster.ends(2)


def sentence(error: Exception) -> str | None:
    """The message that the command line prints for an error; None if the error is a bug of the program."""
    if isinstance(error, FieldError) and error.field in FLAGS:
        return error.sentence(flag_of(error.field))
    if isinstance(error, ValueError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'writing'}: {error.strerror or error}; what was saved before stays whole."
    if isinstance(error, MemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    ):
        return "out of memory: lower the batch size, the lengths or the block size."
    return None


def flag_of(field: str) -> str:
    """The flag of a field."""
    return f"--{field.replace('_', '-')}"


def at_least(least: int, **values: int | None) -> None:
    """Raises FieldError for a flag's value below `least`; None is a flag that is not there."""
    for name, value in values.items():
        if value is not None and value < least:
            raise FieldError(name, value, f"it must be at least {least}.", f"{flag_of(name)} is {value}")


def at_most(largest: int, **values: int) -> None:
    """Raises FieldError for a flag's value beyond what can be done in any time or memory."""
    for name, value in values.items():
        if value > largest:
            raise FieldError(name, value, f"it must be at most {largest}.", f"{flag_of(name)} is {value}")


def check_summary(path: str | None, field: str) -> None:
    """Raises ValueError where a file for summaries holds something else; `field` is one of a summary's."""
    if path is None or not os.path.isfile(path):
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read(2**20)
    try:
        first = json.JSONDecoder().raw_decode(text)[0] if text else {field: None}
    except (ValueError, RecursionError):
        first = None
    if not isinstance(first, dict) or field not in first:
        raise FieldError(
            "summary",
            path,
            "name another file.",
            f"--summary is {path}, which holds something else than summaries",
        )


def table_of(summary: dict[str, Any], title: str) -> Table:
    """Names and values, printed as they are."""
    table = Table(Column(), Column(Text(title)), show_header=True)
    for name, value in summary.items():
        for row, figure in enumerate(value) if name == "levels" else [(None, value)]:
            shown = f"{figure:.3f}" if isinstance(figure, float) else str(figure)
            if isinstance(figure, dict):
                shown = ", ".join(f"{count} {what}" for what, count in figure.items())
            table.add_row(
                Text(name if row is None else f"model {row}"), Text("-" if figure is None else shown)
            )
    return table


def whole_words(*columns: str, title: str) -> Table:
    """A table that never cuts a word off: where the terminal is narrow, a long one continues below."""
    return Table(*(Column(name, overflow="fold") for name in columns), title=title, title_justify="left")


def task_of(config: str, run: DecodeConfig, task: str | None, split: str, join: int | None) -> Task:
    """The task that the pair of `config` is scored on."""
    name = task or run.task
    if name is None:
        raise FieldError(
            "task", None, f"name the training config whose task {config} is scored on.", "--task is missing"
        )
    at_least(1, join=join)
    training = configs.load(name, TrainConfig)
    if split not in ("train", "validation", "test"):
        raise FieldError("split", split, "known: train, validation, test.", f"unknown split {split!r}")
    return dataclasses.replace(training.task, join=training.task.join if join is None else join)
