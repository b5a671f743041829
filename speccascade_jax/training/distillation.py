"""Distillation of a verifier into a drafter: of its distributions (token level) or outputs (sequence
level)."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.core.divergences import DIVERGENCES, target_law
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.loop import generate
from speccascade_jax.core.protocols import AnyArray, LanguageModel, Params
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.inference.inputs import check_text
from speccascade_jax.inference.outputs import resume, write_whole
from speccascade_jax.inference.progress import track
from speccascade_jax.inference.text import Cascade
from speccascade_jax.training.data import Batch, joined_examples

Array = jax.Array


def progress(config: TrainConfig, number: Array | None) -> Array:
    """The progress of training at batch `number`: 0 at the first step, 1 at the last. Without a number, 1."""
    if number is None:
        return jnp.ones(())
    return jnp.asarray(number // config.accumulate, jnp.float32) / max(config.steps - 1, 1)


def distillation_loss(
    logits: Array,
    teacher_logits: Array,
    target_length: AnyArray,
    divergence: str = "kl",
    method: str = "speculative",
    alpha: float = 0.0,
    progress: float | Array = 1.0,
) -> Array:
    """Sums over real tokens the divergence (core.divergences) from the teacher's distribution (token-level
    distillation: Kim & Rush 2016; for drafters: DistillSpec, Zhou et al. 2024). With a `method` other than
    speculative, the divergence is from its pi at `alpha`, against which a cascade verifies the drafter's
    tokens.

    logits and teacher_logits are [B, T, V], target_length is [B]. Computed in at least float32. Only `logits`
    has a gradient, and it ignores pi's dependence on the logits.
    """
    teacher, student = (
        jax.nn.log_softmax(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axis=-1)
        for x in (teacher_logits, logits)
    )
    mask = jnp.arange(logits.shape[1]) < target_length[:, None]
    entry, values = DIVERGENCES[divergence], {"mask": mask, "progress": progress}
    target = target_law(teacher, student, METHODS[method], alpha)
    far = entry.of(target, student, **{name: values[name] for name in entry.needs})
    return jnp.sum(jnp.where(mask, far, 0.0))


def on_policy_texts(
    model: LanguageModel, params: Params, batch: Batch, key: Array, eos_id: int, temperature: float = 1.0
) -> Batch:
    """The batch with targets sampled by `model`, at most as long as the batch is wide (on-policy
    distillation: GKD, Agarwal et al. 2024; for drafters: DistillSpec, Zhou et al. 2024)."""
    rows, width = batch.target.shape
    decoded = generate(
        Autoregressive(model),
        params,
        jax.random.split(key, rows),
        batch.source,
        batch.source_length,
        SamplingOptions(temperature),
        jnp.zeros(0),
        max_new_tokens=width,
        eos_id=eos_id,
    )
    return batch._replace(target=jnp.maximum(decoded.tokens, 0), target_length=decoded.length)


def write_outputs(
    teacher: Cascade,
    task: Task,
    path: Path,
    count: int | None = None,
    batch_size: int = 64,
    singles: bool = False,
) -> None:
    """Decodes the training inputs greedily with the teacher and writes the outputs to the .jsonl file `path`
    (sequence-level distillation: Kim & Rush 2016; BiLD's prediction alignment).

    Inputs are shuffled and joined as in training, and only the first `count` are used. With `singles`, inputs
    are not joined, and duplicates are removed. Outputs that the teacher does not finish within its limits are
    omitted. Does nothing if `path` exists, and resumes a killed call.
    """
    if path.is_file():
        return
    if singles:
        task = dataclasses.replace(task, join=1)
    examples = [source for source, _ in joined_examples(task, task.train)]
    examples = (list(dict.fromkeys(examples)) if singles else examples)[:count]

    def read(number: int, line: Any) -> dict[str, str] | None:
        """Checks a line of the partial file; that of an unfinished output is null."""
        if line is None:
            return None
        if not isinstance(line, dict) or line.keys() != {"source", "target"}:
            raise ValueError("it is no output of a teacher")
        if number > len(examples) or line["source"] != examples[number - 1]:
            raise ValueError("it has another source than the training split")
        return {name: check_text(text, name) for name, text in line.items()}

    settings = {"task": dataclasses.asdict(task), "count": count}
    try:
        lines, part = resume(path.with_name(path.name + ".part"), settings, read)
    except FieldError as error:
        problem, remedy = (
            text.replace("--output", "--teacher-outputs") for text in (error.problem, error.remedy)
        )
        raise FieldError("teacher_outputs", error.value, remedy, problem) from None
    with part:
        outputs = teacher.generate(
            examples[len(lines) :],
            method="verifier",
            batch_size=batch_size,
            truncate=True,
            first_index=len(lines),
        )
        for output in track(outputs, "teacher's outputs", total=len(examples), completed=len(lines)):
            finished = not output.truncated and output.tokens[-1:] == [teacher.tokenizer.eos_id]
            lines.append({"source": output.source, "target": output.text} if finished else None)
            part.add(lines[-1])
        kept = [line for line in lines if line is not None]
        if not kept:
            raise FieldError(
                "max_target_length",
                task.max_target_length,
                "raise --max-target-length.",
                f"the teacher finished none of {len(examples)} outputs within {task.max_target_length} "
                "tokens",
            )
        write_whole(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
        part.remove()


def judged_by(teacher: Cascade, config: TrainConfig) -> TrainConfig:
    """`config` with the teacher's outputs as its validation targets too, decoded once into a file next to the
    training outputs. Measured by the original targets, a student would look worse the more it resembles its
    teacher."""
    task, path = config.task, Path(config.teacher_outputs or "").with_suffix(".validation.jsonl")
    write_outputs(teacher, dataclasses.replace(task, train=task.validation), path)
    return dataclasses.replace(
        config,
        task=dataclasses.replace(
            task, validation=str(path), source_field="source", target_field="target", join=1
        ),
    )


def distilled(task: Task, path: Path, singles: bool = False) -> Task:
    """`task` with the teacher's outputs as its training split. Training joins `singles`; other outputs are
    joined already."""
    return dataclasses.replace(
        task, train=str(path), source_field="source", target_field="target", join=task.join if singles else 1
    )
