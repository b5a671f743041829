"""Scores methods on few-shot tasks: quality and rejection rate (the paper's Gemma 2 protocol).

Examples:

    python scripts/fewshot.py --config=gemma2_2b_27b --task=gsm8k \\
        --methods verifier speculative token_v3
    python scripts/fewshot.py --config=gemma2_2b_27b --task=mbpp \\
        --execute-code --output mbpp.jsonl
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from speccascade_jax import config as configs
from speccascade_jax.cluster import Job, joined
from speccascade_jax.commands.commandline import at_least, config_of, console, exit_code, parsed, table_of
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation.fewshot import (
    TASKS,
    FewShotTask,
    Marks,
    Prompts,
    build_prompts,
    task_of,
)
from speccascade_jax.evaluation.rates import summarize
from speccascade_jax.evaluation.sandbox import check_sandbox
from speccascade_jax.inference.outputs import (
    OutputFile,
    check_targets,
    open_output,
    resume,
    resumed_by,
    settings_file,
)
from speccascade_jax.inference.progress import track
from speccascade_jax.inference.text import Cascade, Output
from speccascade_jax.parallel import decoding_mesh

EXECUTED = ", ".join(name for name, task in TASKS.items() if task.executes)


@dataclasses.dataclass(frozen=True)
class Arguments:
    run: tyro.conf.OmitArgPrefixes[DecodeConfig]
    task: Annotated[
        str,
        tyro.conf.arg(
            help="The task. " + "; ".join(f"{name}: {task.summary}" for name, task in TASKS.items()) + "."
        ),
    ]
    config: str = "gemma2_2b_9b"
    """A config name or path. Its fields are the defaults of the other flags."""
    methods: tuple[str, ...] = ("verifier", "drafter")
    """Methods to evaluate, one after the other, all with the same alpha, temperature and other settings."""
    inputs: str | None = None
    """A file with the questions. Default: the task's file."""
    shot_pool: str | None = None
    """A file with the examples to show in prompts. Default: the task's file."""
    shots: int | None = None
    """The number of examples to show in a prompt. Default: the task's number."""
    shot_seed: int = 0
    """The seed that selects the examples to show."""
    limit: int | None = None
    """The number of questions to ask, from the first one on. Default: all."""
    execute_code: Annotated[
        bool,
        tyro.conf.arg(
            help=f"Run the programs that the models write, in a sandbox (bubblewrap). {EXECUTED} needs this."
        ),
    ] = False
    cluster: str | None = None
    """Decode on the devices of several processes: `auto` on TPU pods and Slurm, otherwise
    HOST:PORT,PROCESSES,NUMBER in each process. The first process reads, scores and writes."""
    output: str | None = None
    """The .jsonl file to write: each method's answers, then its figures. If it exists, the run resumes."""


ROW = {"method", "index", "output", "answer", "result", "counts"}
"""The fields of an answer in --output."""


def chosen_task(arguments: Arguments) -> FewShotTask:
    """The task with the files and shots of the command line. Raises FieldError if it cannot run."""
    task = task_of(arguments.task)
    if task.executes and not arguments.execute_code:
        raise FieldError(
            "execute_code",
            False,
            "allow that with --execute-code, which uses a sandbox.",
            f"{task.name} is scored by running the programs that the models write",
        )
    if task.executes:
        check_sandbox()
    at_least(0, shots=arguments.shots)
    at_least(1, limit=arguments.limit)
    return dataclasses.replace(
        task,
        examples=arguments.inputs or task.examples,
        shot_pool=arguments.shot_pool or task.shot_pool,
        shots=task.shots if arguments.shots is None else arguments.shots,
        fixed_shots=None if arguments.shot_pool else task.fixed_shots,
    )


def part_of(output: str, method: str) -> Path:
    """The file that keeps a method's outputs until all are complete and can be scored."""
    return Path(f"{output}.{method}.part")


def check(arguments: Arguments, task: FewShotTask, run: DecodeConfig) -> None:
    """Raises ValueError for mistakes that would otherwise surface only after hours of decoding."""
    if not arguments.methods:
        raise FieldError("methods", (), "give one or more.", "--methods names none")
    for method in arguments.methods:
        run.by(method).check()
    if arguments.output is None:
        return
    written = {
        "--output": Path(arguments.output),
        "the settings of --output": settings_file(arguments.output),
    }
    for method in dict.fromkeys(arguments.methods):
        part = part_of(arguments.output, method)
        written |= {f"{method}'s part of --output": part, f"{method}'s settings": settings_file(part)}
    check_targets(
        written,
        {
            "--inputs": task.examples,
            "--shot-pool": task.shot_pool,
            "--config": configs.path_of(arguments.config),
            **run.files,
        },
    )


def resume_answers(
    path: str, settings: dict[str, Any], count: int
) -> tuple[dict[str, int], dict[str, dict[str, Any]], OutputFile]:
    """The number of answers and the figures of each method in --output, and the file for adding more."""
    answers: dict[str, int] = {}
    figures: dict[str, dict[str, Any]] = {}

    def read(number: int, line: Any) -> None:
        method = line.get("method") if isinstance(line, dict) else None
        if not isinstance(method, str) or method in figures:
            raise ValueError("neither an answer nor a method's figures")
        n = answers.get(method, 0)
        if line.keys() == ROW and line["index"] == n < count:
            answers[method] = n + 1
        elif "index" not in line and line.get("examples") == n == count:
            figures[method] = line
        else:
            raise ValueError(f"neither answer {n} of {method} nor its figures")

    return answers, figures, resume(path, settings, read)[1]


def decode(
    job: Job,
    cascade: Cascade,
    run: DecodeConfig,
    prompts: Prompts,
    part: Path | None,
    settings: dict[str, Any],
) -> list[Output]:
    """Decodes one method and returns its outputs, which are stored in `part` as they arrive. Only the first
    process has all of them."""
    texts = prompts.texts
    with contextlib.ExitStack() as stack:
        opened = None
        if part is not None:
            opened = partial(open_output, part, {**settings, "method": run.name}, texts)
        file, outputs, resumed = resumed_by(job, stack, opened)
        fresh = cascade.generate(
            texts[resumed:],
            run.settings,
            truncate=run.truncate,
            batch_size=run.batch_size,
            first_index=resumed,
            beginnings=[prompts.shown],
        )
        for output in track(fresh, run.name, len(texts) - resumed, disable=not job.first):
            outputs.append(output)
            if file is not None:
                file.add(dataclasses.asdict(output))
    return outputs


def evaluate(arguments: Arguments) -> None:
    task = chosen_task(arguments)
    run = dataclasses.replace(
        arguments.run, stop=(*arguments.run.stop, *task.stop), max_new_tokens=task.max_new_tokens
    )
    check(arguments, task, run)
    with joined(arguments.cluster) as job:
        evaluate_with(job, arguments, task, run)


def shared_prompts(job: Job, arguments: Arguments, task: FewShotTask) -> Prompts:
    """The prompts that the first process builds. The others have no examples to score."""
    examples = []

    def built() -> tuple[Any, ...]:
        prompts = build_prompts(task, arguments.shot_seed, arguments.limit)
        examples.extend(prompts.examples)
        return prompts.texts, prompts.shots, prompts.shown

    texts, shots, shown = job.share(built)
    return Prompts(texts, examples, shots, shown)


def evaluate_with(job: Job, arguments: Arguments, task: FewShotTask, run: DecodeConfig) -> None:
    """Decodes with all processes of a job; the first one scores and writes."""
    run, screen = run.on_this_machine(), console(quiet=not job.first)
    job.agree(run.record() | {"methods": arguments.methods})
    prompts = shared_prompts(job, arguments, task)
    kept = run.record("task", "missing", "examples", "method", "batch_size", "prefix_cache_bytes")
    kept |= {
        "task": arguments.task,
        "inputs": task.examples,
        "shot_pool": task.shot_pool,
        "shots": prompts.shots,
        "limit": arguments.limit,
    }
    with contextlib.ExitStack() as stack:
        written, finished, file = dict[str, int](), dict[str, dict[str, Any]](), None

        def resumed() -> dict[str, dict[str, Any]]:
            nonlocal written, finished, file
            if arguments.output is not None:
                written, finished, file = resume_answers(arguments.output, kept, len(prompts.texts))
                stack.enter_context(file)
            return finished

        finished, cascade = job.share(resumed), None
        for method in dict.fromkeys(arguments.methods):
            described = settings_of(arguments, run, prompts, method)
            title = f"{method}, alpha {run.alpha}, temperature {run.temperature}"
            if method in finished:
                shown = {k: v for k, v in finished[method].items() if k not in described}
                screen.print(table_of(shown, f"{title}, from {arguments.output}"))
                continue
            if cascade is None:
                mesh = decoding_mesh(run.tensor_parallel, run.batch_size > 1)
                cascade = Cascade.from_config(run, mesh)
                if not run.truncate:  # better now than after hours of decoding
                    cascade.encode(prompts.texts)
            part = None if arguments.output is None else part_of(arguments.output, method)
            outputs = decode(job, cascade, run.by(method), prompts, part, kept)
            if not job.first:
                continue
            answers = [task.read(output.text) for output in outputs]
            marks = task.score(answers, prompts.examples)
            figures = figures_of(marks, outputs)
            screen.print(table_of(figures, title))
            if file is None or part is None:
                continue
            rows = lines_of(method, outputs, answers, marks)
            for line in (*rows[written.get(method, 0) :], {**described, **figures}):
                file.add(line)
            for path in (part, settings_file(part)):
                path.unlink(missing_ok=True)


def settings_of(arguments: Arguments, run: DecodeConfig, prompts: Prompts, method: str) -> dict[str, Any]:
    """The settings that a method's line of figures begins with."""
    return {
        "config": arguments.config,
        "task": arguments.task,
        "method": method,
        "alpha": run.alpha,
        "temperature": run.temperature,
        "block_size": run.block_size,
        "seed": run.seed,
        "shot_seed": arguments.shot_seed,
        "shots": prompts.shots,
    }


def lines_of(
    method: str, outputs: Sequence[Output], answers: Sequence[Any], marks: Marks
) -> list[dict[str, Any]]:
    """The line of each output in --output. `result` is None if only the whole set has a score."""
    results = marks.answers or [None] * len(outputs)
    return [
        {
            "method": method,
            "index": output.index,
            "output": output.text,
            "answer": answer,
            "result": result,
            "counts": output.counts,
        }
        for output, answer, result in zip(outputs, answers, results, strict=True)
    ]


def figures_of(marks: Marks, outputs: list[Output]) -> dict[str, Any]:
    rates = summarize([output.counts for output in outputs])
    accepted = rates["acceptance_rate"]
    return {
        **marks.figures,
        "rejection_rate": None if accepted is None else 1 - accepted,
        **rates,
        "examples": len(outputs),
        "truncated": sum(output.truncated for output in outputs),
    }


def parse(argv: list[str]) -> Arguments:
    name, run = config_of(argv, DecodeConfig, "gemma2_2b_9b")
    return parsed(Arguments, argv, "fewshot", __doc__, Arguments(run, tyro.MISSING, name))


def main(argv: list[str]) -> int:
    return exit_code(lambda: evaluate(parse(argv)))
