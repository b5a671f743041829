"""Code that the commands share: parsing flags, help texts, tables, errors and exit codes."""

import argparse
import ast
import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import jax
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from speccascade_jax import cluster
from speccascade_jax import config as configs
from speccascade_jax.commands import NAMES, Terminated
from speccascade_jax.config import DecodeConfig, LearnedRuleConfig, Task, TrainConfig
from speccascade_jax.core.errors import FieldError

T = TypeVar("T")
FLAGS = {
    field.name
    for config in (DecodeConfig, TrainConfig, LearnedRuleConfig)
    for field in dataclasses.fields(config)
}
"""The fields of configs, which are flags of commands."""


def config_of(argv: list[str], kind: Any, default: str | None = None) -> tuple[str, Any]:
    """The value of --config in argv (or `default`), and that config, which must be a `kind`.

    It is read before the rest of the command line, because its fields are the defaults of the other flags.
    With --help, it may be missing.
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
            f"give --config=NAME; known: {', '.join(configs.available())}.",
            "--config is missing",
        )
    return name, configs.load(name, kind)


TRAINED = TrainConfig | LearnedRuleConfig
"""The configs that finetune trains."""


def table_of_configs(kind: Any, title: str) -> Table:
    """A table of all configs that are a `kind`, with the first paragraph of their docstrings, and of broken
    ones."""
    table = Table("config", "description", title=title, title_justify="left")
    for name, path in configs.available().items():
        try:
            if isinstance(configs.load(path), kind):
                what = ast.get_docstring(ast.parse(path.read_bytes())) or ""
                table.add_row(Text(name), Text(" ".join(what.split("\n\n")[0].split())))
        except ValueError as error:
            table.add_row(Text(name), Text(f"broken: {error}"))
    return table


def keep_compilations() -> None:
    """Keeps compiled programs in $JAX_COMPILATION_CACHE_DIR, or else in the user's cache directory, so that a
    second start of a command compiles nothing."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "speccascade_jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def is_script() -> bool:
    """Whether a file of scripts/ runs, and not the installed command `speccascade`."""
    return Path(sys.argv[0]).name in {f"{name}.py" for name in NAMES}


def called(command: str) -> str:
    """The words that run `command`: those of a script if this process runs one."""
    return f"python scripts/{command}.py" if is_script() else f"speccascade {command}"


def parsed(kind: type[T], argv: list[str], command: str, about: str | None, default: Any = None) -> T:
    """Parses the arguments of `command`, a `kind`. For --help, prints `about` and the help of each field,
    wrapped at the terminal's width.

    default: the values of flags that are not given (by default, those of `kind`).
    """
    shown = _Captured()
    program = f"{command}.py" if is_script() else f"speccascade {command}"
    try:
        with contextlib.redirect_stdout(shown):
            return tyro.cli(
                kind,
                **({} if default is None else {"default": default}),
                args=argv,
                prog=program,
                description=_PLACE,
                registry=_in_paragraphs(),
            )
    finally:
        text = shown.getvalue().replace("show this help message", "Show this help message")
        text = re.sub(r"^│ *│\n", "", text, flags=re.MULTILINE)  # below a help text that fills its last line
        print(text.replace(_PLACE, description(about or "")), end="")


_PLACE = "__description__"
"""The mark that the command's description replaces, which tyro would not wrap."""


class _Captured(io.StringIO):
    """Text on its way to stdout. It is formatted for stdout, in colour on a terminal."""

    encoding = str(getattr(sys.__stdout__, "encoding", None))

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def description(about: str) -> str:
    """A docstring for the terminal: wrapped paragraphs, indented lines unchanged, and examples that call
    commands as the user did."""
    width = shutil.get_terminal_size().columns
    paragraphs = [
        paragraph
        if paragraph.startswith(" ")
        else textwrap.fill(" ".join(paragraph.split()), width, break_on_hyphens=False)
        for paragraph in about.strip().split("\n\n")
    ]
    text = "\n\n".join(paragraphs)
    return text if is_script() else re.sub(r"python scripts/(\w+)\.py", r"speccascade \1", text)


def _in_paragraphs() -> ConstructorRegistry:
    """A registry for help texts without the line breaks of the source, and without hints on empty
    defaults."""
    registry, within = ConstructorRegistry(), list[StructTypeInfo]()

    @registry.struct_rule
    def flowing(info: StructTypeInfo) -> StructConstructorSpec | None:
        if within:  # called by itself below: leave the fields to the next rule
            return None
        within.append(info)
        try:
            made = ConstructorRegistry.get_struct_spec(info)
        finally:
            within.clear()
        if not isinstance(made, StructConstructorSpec) or not dataclasses.is_dataclass(info.type):
            return None
        return dataclasses.replace(made, fields=tuple(map(_flowing, made.fields)))

    return registry


_OPTIONAL: dict[Any, str] = {
    kind: name
    for scalar, what in ((str, "STR"), (int, "INT"), (float, "FLOAT"))
    for kind, name in ((scalar | None, what), (tuple[scalar, ...] | None, f"[{what} [{what} ...]]"))
}
"""The help's names of values that may also be None, by type."""


def _flowing(field: StructFieldSpec) -> StructFieldSpec:
    def text() -> str | None:
        written = field.helptext() if callable(field.helptext) else field.helptext
        return None if written is None else " ".join(written.split())

    if dataclasses.is_dataclass(field.default):  # not a flag, but a group of flags
        return dataclasses.replace(field, helptext=text)
    plain = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
    about = tyro.conf.arg(metavar=_OPTIONAL.get(plain), help_behavior_hint=_default_of)
    kind: Any = Annotated[field.type, about]
    return dataclasses.replace(field, type=kind, helptext=text)


def _default_of(label: str) -> str:
    """The hint on a default; empty for an empty one, which the help text explains."""
    if label.startswith("['"):  # of a field that takes names or objects
        with contextlib.suppress(ValueError, SyntaxError):
            label = " ".join(map(str, ast.literal_eval(label)))
    return "" if label in ("None", "", "''") else f"(default: {label})"


def console(**options: Any) -> Console:
    """A console that prints texts verbatim, because names and sentences may look like Rich's markup."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def exit_code(work: Callable[[], None], interrupted: str = "") -> int:
    """Runs work() and returns the exit code: 0; 2 for a ValueError (bad input), an OSError (a full disk) or
    too little memory, which are reported in one sentence; 130 if interrupted, 143 if terminated."""
    keep_compilations()
    for stream in (sys.stdout, sys.stderr):  # characters outside the terminal's encoding must not fail
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    errors = console(stderr=True)
    try:
        work()
        return 0
    except BrokenPipeError:  # the reader of the output has exited: `decode.py | head`
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
    """The message that the command line prints for an error; None if the error is a bug in this package."""
    if isinstance(error, FieldError) and error.field in FLAGS:
        return error.sentence(flag_of(error.field))
    if isinstance(error, ValueError):
        return str(error)
    if isinstance(error, OSError):
        where, what = error.filename or "writing", error.strerror or error
        return f"{where}: {what}; files that were already saved are intact."
    if isinstance(error, MemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    ):
        return "out of memory: lower the batch size, the lengths or the block size."
    return None


def flag_of(field: str) -> str:
    """The flag of a field."""
    return f"--{field.replace('_', '-')}"


def at_least(least: int, **values: int | None) -> None:
    """Raises FieldError for a flag's value below `least`; None is a flag that was not given."""
    for name, value in values.items():
        if value is not None and value < least:
            raise FieldError(name, value, f"it must be at least {least}.", f"{flag_of(name)} is {value}")


def at_most(largest: int, **values: int) -> None:
    """Raises FieldError for a flag's value above `largest`, which no machine could process."""
    for name, value in values.items():
        if value > largest:
            raise FieldError(name, value, f"it must be at most {largest}.", f"{flag_of(name)} is {value}")


def check_summary(path: str | None, field: str) -> None:
    """Raises ValueError if `path` exists and is not a summary file; `field` is a field of summaries."""
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
            "choose another file.",
            f"--summary is {path}, which is not a summary file",
        )


def table_of(summary: dict[str, Any], title: str) -> Table:
    """A table of names and values, printed verbatim."""
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
    """A table that never truncates a word: on a narrow terminal, a long word continues on the next line. It
    spends little width on lines, so that words are seldom cut."""
    return Table(
        *(Column(name, overflow="fold") for name in columns),
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )


def task_of(config: str, run: DecodeConfig, task: str | None, split: str, join: int | None) -> Task:
    """The task that scores the pair of `config`."""
    name = task or run.task
    if name is None:
        raise FieldError(
            "task", None, f"give the training config whose task scores {config}.", "--task is missing"
        )
    at_least(1, join=join)
    training = configs.load(name, TrainConfig)
    if split not in ("train", "validation", "test"):
        raise FieldError("split", split, "known: train, validation, test.", f"unknown split {split!r}")
    return dataclasses.replace(training.task, join=training.task.join if join is None else join)
