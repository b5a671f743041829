"""Measurements as printed tables and as JSON lines."""

import datetime
import os
import platform
import sys
from typing import Any

import jax

from speccascade_jax.commands.commandline import console, table_of
from speccascade_jax.evaluation.records import commit
from speccascade_jax.inference.outputs import append_line


class Report:
    """Prints tables, and writes the same figures as JSON lines, each with the device, commit and date. A
    `quiet` report does neither."""

    def __init__(self, path: str | None, dtype: str, device: str | None = None, quiet: bool = False):
        self.screen, self.path = console(quiet=quiet), None if quiet else path
        self.stamp = {
            "device": device or jax.devices()[0].device_kind,
            "machine": platform.machine(),
            "threads": os.cpu_count(),
            "dtype": dtype,
            "jax": jax.__version__,
            "commit": commit() or "",
            "date": datetime.date.today().isoformat(),
            "command": " ".join(sys.argv),
        }
        self.screen.print(table_of({k: v for k, v in self.stamp.items() if k != "command"}, "measured on"))

    def table(self, title: str, figures: dict[str, Any]) -> None:
        self.screen.print(table_of(figures, title))
        if self.path is not None:
            for name, value in figures.items():
                append_line(self.path, {"of": title, "figure": name, "value": value, **self.stamp})
