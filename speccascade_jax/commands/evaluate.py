"""Scores methods on a task's test split, decoding on all devices.

    python scripts/evaluate.py --config=demo --methods verifier drafter token_v3
    python scripts/evaluate.py --config=demo --methods verifier --output texts

Quality is printed with its 95% bootstrap interval. With --output, running the same command again resumes an
interrupted run.
"""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from speccascade_jax import config as configs
from speccascade_jax.cluster import Job, joined
from speccascade_jax.commands.commandline import (
    at_least,
    check_summary,
    config_of,
    console,
    exit_code,
    parsed,
    table_of,
    task_of,
)
from speccascade_jax.commands.profiles import check_profile, profiled
from speccascade_jax.config import DecodeConfig, Task
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation.coverage import shown as shared
from speccascade_jax.evaluation.quality import METRICS, bootstrap, score, statistics
from speccascade_jax.evaluation.rates import check_counts, summarize
from speccascade_jax.inference.outputs import (
    OutputFile,
    append_line,
    check_targets,
    open_output,
    resumed_by,
    settings_file,
)
from speccascade_jax.inference.progress import track
from speccascade_jax.inference.ray_jobs import cut, finished
from speccascade_jax.inference.ray_jobs import decode as on_ray
from speccascade_jax.inference.text import Cascade, Output
from speccascade_jax.inference.vocabulary_checks import check_methods
from speccascade_jax.parallel import decoding_mesh, gather_text, local_mesh, own_share
from speccascade_jax.training.data import joined_examples


@dataclasses.dataclass(frozen=True)
class Arguments:
    run: tyro.conf.OmitArgPrefixes[DecodeConfig]
    config: str = "demo"
    """A config name or path. Its fields are the defaults of the other flags."""
    task: str | None = None
    """The training config that defines the task. Default: the task of --config."""
    split: str = "test"
    """The split to score: train, validation or test."""
    methods: tuple[str, ...] | None = None
    """Methods to evaluate, one after the other, all with the same alpha, temperature and other settings.
    Default: the verifier alone, and the drafter alone if it is a model."""
    join: int | None = None
    """Join between one and this many examples into one. Default: the task's number."""
    limit: int | None = None
    """The number of examples to decode, from the first one on. Default: all."""
    output: str | None = None
    """A folder for the outputs, METHOD.jsonl. If a file exists, decoding resumes where it ends."""
    summary: str | None = None
    """A .jsonl file to which one line with the figures of each method is appended."""
    cluster: str | None = None
    """Distribute the examples over several processes (with --tensor-parallel, the models): `auto` on TPU pods
    and Slurm, otherwise HOST:PORT,PROCESSES,NUMBER in each process."""
    ray: str | None = None
    """Decode on the Ray cluster at this address, or `local` for this machine. Needs --output, which keeps the
    shards."""
    ray_workers: int | None = None
    """With --ray: the number of decoding processes. Default: one per machine."""
    shard_size: int = 256
    """With --ray: the number of examples per shard."""
    profile: str | None = None
    """A new folder for a trace of the run, which XProf, TensorBoard and Perfetto can open."""

    @property
    def compared(self) -> tuple[str, ...]:
        """The methods to evaluate."""
        return self.run.models_alone if self.methods is None else self.methods


def settings_of(arguments: Arguments, method: str, first: int = 0) -> dict[str, Any]:
    """The settings and examples that determine the lines of a method's outputs."""
    settings = arguments.run.record(
        "task", "missing", "examples", "method", "batch_size", "prefix_cache_bytes"
    )
    return settings | {"method": method, "split": arguments.split, "first": first}


def output_file(
    arguments: Arguments, method: str, first: int, texts: Sequence[str], part: str = ""
) -> tuple[OutputFile, list[Output]]:
    """The file in --output for a method's outputs, and the outputs that it already has."""
    path = Path(arguments.output or "") / f"{method}{part}.jsonl"
    return open_output(path, settings_of(arguments, method, first), texts, first)


def decode_share(
    job: Job, arguments: Arguments, cascade: Cascade, method: str, sources: Sequence[str]
) -> str:
    """Decodes this process's share of `sources` to JSON lines, and writes them to --output. Processes that
    share the models decode all sources, and the first process returns the lines."""
    run, together = arguments.run, shares_models(arguments)
    begin, end = (0, len(sources)) if together else own_share(len(sources))
    texts = list(sources[begin:end])
    with contextlib.ExitStack() as stack:
        opened = None
        if arguments.output is not None:
            part = "" if together or job.processes == 1 else f".{job.number}-of-{job.processes}"
            opened = partial(output_file, arguments, method, begin, texts, part)
        file, done, resumed = resumed_by(job if together else Job(), stack, opened)
        lines = [json.dumps(dataclasses.asdict(output)) + "\n" for output in done]
        outputs = cascade.generate(
            texts[resumed:],
            run.settings.by(method),
            truncate=run.truncate,
            batch_size=run.batch_size,
            first_index=begin + resumed,
        )
        for output in track(outputs, method, len(texts) - resumed, disable=not job.first):
            lines.append(json.dumps(dataclasses.asdict(output)) + "\n")
            if file is not None:
                file.add(dataclasses.asdict(output))
    return "" if together and not job.first else "".join(lines)


def shares_models(arguments: Arguments) -> bool:
    """Whether the processes of a cluster share each model, rather than only the examples."""
    return arguments.cluster is not None and arguments.run.tensor_parallel > 1


def decode_on_ray(arguments: Arguments, address: str, method: str, sources: Sequence[str]) -> str:
    """The JSON lines of `sources`, decoded by a Ray cluster; complete shards are kept."""
    run, settings = arguments.run.by(method), settings_of(arguments, method)
    shards = cut(sources, arguments.shard_size, Path(arguments.output or "") / f"{method}-shards")
    todo = [shard for shard in shards if finished(shard, settings) is None]
    if todo:
        decoded = on_ray(address, arguments.ray_workers, run, settings, todo)
        for _ in track(decoded, method, len(todo)):
            pass
    outputs = [output for shard in shards for output in finished(shard, settings) or ()]
    return "".join(json.dumps(dataclasses.asdict(output)) + "\n" for output in outputs)


def figures_of(
    metric: str, outputs: list[Output], references: Sequence[Sequence[str]], baseline: np.ndarray | None
) -> tuple[dict[str, Any], np.ndarray]:
    """The figures and statistics of one method; `baseline` is the first method's statistics."""
    check_counts([o.counts for o in outputs], [len(o.tokens) for o in outputs])
    texts, entry = [o.text for o in outputs], METRICS[metric]
    sums = statistics(metric, texts, references)
    figures: dict[str, Any] = {metric: score(metric, sums.sum(axis=0)), "95%": bootstrap(metric, sums)}
    if baseline is not None:
        figures["over the first"] = figures[metric] - score(metric, baseline.sum(axis=0))
        figures["over the first, 95%"] = bootstrap(metric, sums, baseline)
    if entry.details is not None:
        figures |= entry.details(texts, references)
    return figures, sums


def check(arguments: Arguments, task: Task) -> None:
    """Raises ValueError for mistakes that would otherwise surface only after hours of decoding."""
    if not arguments.compared:
        raise FieldError("methods", (), "give one or more.", "--methods is empty")
    for method in arguments.compared:
        arguments.run.by(method).check()
    at_least(1, limit=arguments.limit, shard_size=arguments.shard_size, ray_workers=arguments.ray_workers)
    if arguments.ray is not None and (arguments.output is None or arguments.cluster is not None):
        if arguments.output is None:
            raise FieldError(
                "ray",
                arguments.ray,
                "give --output, and leave --cluster out.",
                "--ray needs a folder for its shards, and --output is missing",
            )
        raise FieldError("ray", arguments.ray, "give one.", "--ray and --cluster exclude each other")
    written: dict[str, str | Path | None] = {}
    if arguments.output is not None:
        folder = Path(arguments.output)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FieldError(
                "output", str(folder), "--output is a folder.", f"cannot write {folder}: {error.strerror}"
            ) from None
        for method in dict.fromkeys(arguments.compared):
            path = folder / f"{method}.jsonl"
            written |= {f"{method}'s file of --output": path, f"{method}'s settings": settings_file(path)}
    read = {
        "--config": configs.path_of(arguments.config),
        **arguments.run.files,
        f"the {arguments.split} split": getattr(task, arguments.split),
    }
    check_targets({**written, "--summary": arguments.summary}, read)
    check_summary(arguments.summary, "method")
    if arguments.ray is not None and arguments.profile is not None:
        raise FieldError("profile", arguments.profile, "give one.", "--ray and --profile exclude each other")
    check_profile(arguments.profile)


def evaluate(arguments: Arguments) -> None:
    task = task_of(arguments.config, arguments.run, arguments.task, arguments.split, arguments.join)
    check(arguments, task)
    check_methods(
        arguments.run,
        [arguments.run.settings.by(method) for method in arguments.compared],
    )
    with joined(arguments.cluster) as job:
        evaluate_with(job, arguments, task)


def evaluate_with(job: Job, arguments: Arguments, task: Task) -> None:
    """Decodes with all processes of a job; the first process scores."""
    if arguments.ray is None:  # otherwise each worker has its own machine
        arguments = dataclasses.replace(arguments, run=arguments.run.on_this_machine())
    run, screen = arguments.run, console(quiet=not job.first)
    job.agree(settings_of(arguments, "", 0) | {"methods": arguments.compared, "batch_size": run.batch_size})
    examples = joined_examples(task, getattr(task, arguments.split))[: arguments.limit]
    sources, references = zip(*examples, strict=True)
    apart = run.tensor_parallel == 1
    cascade = Cascade.from_config(run, local_mesh() if apart else decoding_mesh(run.tensor_parallel))
    for method in arguments.compared:  # better now than after hours of decoding
        cascade.checked(run.settings.by(method), {})
    if not run.truncate:
        cascade.encode(sources)
    first = None
    for method in arguments.compared:
        before = cascade.clock.decode_seconds
        if arguments.ray is None:
            with profiled(Path(arguments.profile, method) if arguments.profile else None):
                text = "".join(gather_text(decode_share(job, arguments, cascade, method, sources)))
        else:
            text = decode_on_ray(arguments, arguments.ray, method, sources)
        if not job.first:
            continue
        outputs = [Output(**json.loads(line)) for line in text.split("\n")[:-1]]
        if arguments.output is not None and (job.processes > 1 or arguments.ray is not None):
            file, done = output_file(arguments, method, 0, sources)
            with file:
                for output in outputs[len(done) :]:
                    file.add(dataclasses.asdict(output))
        figures, sums = figures_of(task.metric, outputs, references, first)
        first = sums if first is None else first
        figures |= {
            **summarize([o.counts for o in outputs]),
            "examples": len(outputs),
            "truncated": sum(o.truncated for o in outputs),
            "tokens": sum(len(o.tokens) for o in outputs),
            "decode_seconds": None if arguments.ray else cascade.clock.decode_seconds - before,
            **shared(cascade, outputs),
        }
        screen.print(
            table_of(
                {
                    name: "{:.2f} to {:.2f}".format(*value) if isinstance(value, tuple) else value
                    for name, value in figures.items()
                },
                f"{method}, alpha {run.alpha}, temperature {run.temperature}",
            )
        )
        if arguments.summary is not None:
            append_line(
                arguments.summary,
                {
                    "config": arguments.config,
                    "method": method,
                    "alpha": run.alpha,
                    "temperature": run.temperature,
                    "block_size": run.block_size,
                    **figures,
                },
            )


def parse(argv: list[str]) -> Arguments:
    name, run = config_of(argv, DecodeConfig, "demo")
    return parsed(Arguments, argv, "evaluate", __doc__, Arguments(run, name))


def main(argv: list[str]) -> int:
    return exit_code(lambda: evaluate(parse(argv)), "; with --output, the same command resumes")
