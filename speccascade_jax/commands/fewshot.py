"""Few-shot tasks: quality and rejection rate of a cascade's methods (the paper's Gemma 2 protocol).

    python scripts/fewshot.py --config=gemma2_2b_27b --task=gsm8k --methods verifier speculative token_v3
    python scripts/fewshot.py --config=gemma2_2b_27b --task=mbpp --execute-code --output mbpp.jsonl
"""

import dataclasses
import json
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track

from speccascade_jax.commands.commandline import config_of, exit_code, table_of
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.metrics import summarize
from speccascade_jax.evaluation.fewshot import TASKS, build_prompts
from speccascade_jax.evaluation.sandbox import check_sandbox, parse_tests
from speccascade_jax.inference.text import Cascade


@dataclasses.dataclass(frozen=True)
class Arguments:
    run: tyro.conf.OmitArgPrefixes[DecodeConfig]
    task: str
    """gsm8k, mbpp, squad2, webquestions, naturalquestions, triviaqa, wmt or cnndm."""
    config: str = "gemma2_2b_9b"
    """A name in configs/ or the path of such a file; its fields are the defaults of all other flags."""
    methods: tuple[str, ...] = ("verifier", "drafter")
    """Decoded one after the other, all at the same alpha, temperature and so on."""
    inputs: str | None = None
    """The examples that are asked, in place of the task's own file."""
    shot_pool: str | None = None
    """The examples that are shown, in place of the task's own file."""
    shots: int | None = None
    shot_seed: int = 0
    """Which of the pool are shown."""
    limit: int | None = None
    """Ask only the first so many examples."""
    execute_code: bool = False
    """Run what the models wrote, in a sandbox: mbpp is scored by nothing else."""
    output: str | None = None
    """Write JSON lines here: each method's answers, then its figures."""


def evaluate(arguments: Arguments) -> None:
    if arguments.task not in TASKS:
        raise ValueError(f"unknown task {arguments.task!r}: {', '.join(TASKS)}.")
    if arguments.task == "mbpp" and not arguments.execute_code:
        raise ValueError("mbpp is scored by running what the models wrote: allow that, in a sandbox, with "
                         "--execute-code.")
    if arguments.task == "mbpp":
        check_sandbox()
    own = TASKS[arguments.task]
    task = dataclasses.replace(
        own, examples=arguments.inputs or own.examples, shot_pool=arguments.shot_pool or own.shot_pool,
        shots=own.shots if arguments.shots is None else arguments.shots,
        fixed_shots=None if arguments.shot_pool else own.fixed_shots)
    prompts = build_prompts(task, arguments.shot_seed, arguments.limit)
    if arguments.task == "mbpp":
        for example in prompts.examples:
            parse_tests(example["test_list"])  # one that cannot be judged is found before models are loaded
    run = dataclasses.replace(arguments.run, stop=(*arguments.run.stop, *task.stop),
                              max_new_tokens=task.max_new_tokens)
    cascade, console = Cascade.from_config(run), Console(highlight=False)
    for method in arguments.methods:
        outputs = list(track(cascade.generate(
            prompts.texts, method=method, alpha=run.alpha, block_size=run.block_size,
            temperature=run.temperature, top_k=run.top_k, top_p=run.top_p, seed=run.seed,
            batch_size=run.batch_size, truncate=run.truncate), method, len(prompts.texts), transient=True))
        answers = [task.read(output.text) for output in outputs]
        scored = task.score(answers, prompts.examples)
        rates = summarize([output.counts for output in outputs])
        accepted = rates["acceptance_rate"]
        figures = {**scored.figures, "rejection_rate": None if accepted is None else 1 - accepted, **rates,
                   "examples": len(outputs), "truncated": sum(output.truncated for output in outputs)}
        console.print(table_of(figures, f"{method}, alpha {run.alpha}, temperature {run.temperature}"))
        if arguments.output is None:
            continue
        settings = {"config": arguments.config, "task": arguments.task, "method": method, "alpha": run.alpha,
                    "temperature": run.temperature, "gamma": run.block_size, "seed": run.seed,
                    "shot_seed": arguments.shot_seed, "shots": prompts.shots}
        each = scored.each or [None] * len(outputs)
        with Path(arguments.output).open("a") as file:
            for output, answer, result in zip(outputs, answers, each, strict=True):
                file.write(json.dumps({"method": method, "index": output.index, "output": output.text,
                                       "answer": answer, "result": result, "counts": output.counts}) + "\n")
            file.write(json.dumps({**settings, **figures}) + "\n")


def parse(argv: list[str]) -> Arguments:
    name, run = config_of(argv, DecodeConfig, "gemma2_2b_9b")
    return tyro.cli(Arguments, default=Arguments(run, tyro.MISSING, name), args=argv, prog="fewshot.py",
                    description=__doc__)


def main(argv: list[str]) -> int:
    return exit_code(lambda: evaluate(parse(argv)))
