"""`--profile=FOLDER`: a trace of the run for XProf, TensorBoard or Perfetto."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import jax

from speccascade_jax.core.errors import FieldError


def check_profile(folder: str | None) -> None:
    """Raises FieldError unless a trace can be written to `folder`, which must be new or empty."""
    if folder is None:
        return
    if os.path.isdir(folder) and not os.listdir(folder):
        return
    try:
        os.makedirs(folder)
    except OSError as error:
        raise FieldError(
            "profile", folder, "name a new folder.", f"--profile is {folder}: {error.strerror}"
        ) from None


@contextlib.contextmanager
def profiled(folder: str | Path | None) -> Iterator[None]:
    """Writes a trace of the code inside the context to `folder`; does nothing if `folder` is None. Operations
    have the names of rounds, levels and models, except in programs that were cached without names."""
    if folder is None:
        yield
        return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python calls would hide everything else
    jax.profiler.start_trace(folder, profiler_options=options)
    try:
        yield
    finally:
        jax.profiler.stop_trace()
