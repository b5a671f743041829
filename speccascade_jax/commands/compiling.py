"""benchmark.py --tpu: compiles a pair's programs for TPUs and reports what they need."""

from collections.abc import Sequence
from typing import Any

import jax

from speccascade_jax.commands.commandline import at_least, at_most
from speccascade_jax.commands.reporting import Report
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation import tpus
from speccascade_jax.models import Config


def check(arguments: Any) -> None:
    """Raises ValueError for flags of benchmark.py that --tpu excludes, or that are out of range."""
    a = arguments
    if a.input is not None or a.vs:
        raise FieldError(
            "tpu", a.tpu, "leave --input and --vs out.", "--tpu only compiles and does not run anything"
        )
    if not 0 <= a.acceptance <= 1:
        raise FieldError("acceptance", a.acceptance, "it must be in [0, 1].")
    at_least(
        1,
        source_length=min(a.source_length, default=1),
        new_tokens=a.new_tokens,
        tensor_parallel=min(a.tensor_parallel, default=1),
    )
    at_most(2**20, source_length=max(a.source_length, default=1), new_tokens=a.new_tokens or 1)
    tpus.checked(a.tpu)


def compile_for_tpus(arguments: Any, run: DecodeConfig, shapes: Sequence[Config] | None) -> None:
    """Prints tables for every number of chips, source length, batch size and block size. Without `shapes`,
    the models are those of the config.

    Raises ValueError before compiling anything if one of the combinations cannot be compiled.
    """
    a, dtype = arguments, tpus.dtype_of(run)
    drafter, verifier = shapes or tpus.shapes_of(run)
    each = [
        tpus.Shapes(
            drafter,
            verifier,
            length,
            a.new_tokens or run.max_new_tokens,
            block_size,
            a.method,
            rows,
            devices,
            dtype,
            verification=a.verification,
        )
        for devices in a.tensor_parallel or (run.tensor_parallel,)
        for length in a.source_length or (run.max_source_length,)
        for rows in a.batch_sizes
        for block_size in a.block_sizes
    ]
    described = tpus.devices_of(a.tpu)
    for case in each:
        tpus.check_pair(case, described)
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are reported
    report = Report(a.output, dtype, device=a.tpu)
    for number, case in enumerate(each, 1):
        name = "compiling" if len(each) == 1 else f"compiling {number} of {len(each)}"
        for title, figures in tpus.figures(tpus.Pair(case, described), a.tpu, a.acceptance, name):
            report.table(title, figures)
