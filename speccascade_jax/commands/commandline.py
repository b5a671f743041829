"""What the scripts share: a config's fields as flags, and how they end."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from speccascade_jax import config as configs
from speccascade_jax.config import DecodeConfig, Task, TrainConfig


def config_of(argv: list[str], kind: type, default: str | None = None) -> tuple[str, Any]:
    """The name after --config in argv (or `default`), and that config, which must be a `kind`.

    Found before the rest of the command line is parsed: its fields are the other flags' defaults.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", default=default)
    name = finder.parse_known_args(argv)[0].config
    if name is None:
        raise ValueError(f"give --config=NAME, one of: {', '.join(configs.available())}.")
    config = configs.load(name)
    if not isinstance(config, kind):
        raise ValueError(f"config {name} is a {type(config).__name__}; this script runs a {kind.__name__}.")
    return name, config


def keep_compilations() -> None:
    """Compiled programs outlive the process, in $JAX_COMPILATION_CACHE_DIR, else in the user's cache
    directory: the second start of a script compiles nothing."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "speccascade_jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def exit_code(work: Callable[[], None], interrupted: str = "") -> int:
    """work(), and 0; 2 where it raises a ValueError (bad input) or an OSError (a full disk), said in
    one sentence; 130 when interrupted."""
    keep_compilations()
    errors = Console(stderr=True, highlight=False)
    try:
        work()
        return 0
    except BrokenPipeError:  # the reader of our output has left: `decode.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:
        said = str(error)
    except OSError as error:
        said = f"{error.filename or 'writing'}: {error.strerror}; what was saved before stays whole."
    except KeyboardInterrupt:
        errors.print(f"interrupted{interrupted}.")
        return 130
    errors.print(f"error: {said}", style="red", markup=False, soft_wrap=True)
    return 2


def table_of(summary: dict[str, Any], title: str) -> Table:
    table = Table("", title, show_header=True)
    for name, value in summary.items():
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        table.add_row(name, "-" if value is None else shown)
    return table


def task_of(config: str, run: DecodeConfig, task: str | None, split: str, join: int | None) -> Task:
    """The task that the pair of `config` is scored on."""
    name = task or run.task
    if name is None:
        raise ValueError(f"--task is missing: name the training config whose task {config} is scored on.")
    training = configs.load(name)
    if not isinstance(training, TrainConfig):
        raise ValueError(f"config {name} has no task: name one for scripts/finetune.py.")
    if split not in ("train", "validation", "test"):
        raise ValueError(f"unknown split {split!r}: train, validation or test.")
    return dataclasses.replace(training.task, join=join or training.task.join)
