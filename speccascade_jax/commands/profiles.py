"""`--profile=FOLDER`: what JAX did, as a trace for XProf, TensorBoard or Perfetto."""

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
    """Traces what runs within it into `folder`; traces nothing if `folder` is None. In the trace, operations
    carry the names of rounds, levels and models, except those of programs that were compiled for the cache
    without them."""
    if folder is None:
        yield
        return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every call of Python's would hide the rest
    jax.profiler.start_trace(folder, profiler_options=options)
    try:
        yield
    finally:
        jax.profiler.stop_trace()
