"""Fitting a drafter to its verifier: its distributions (token level), its outputs (sequence level)."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.progress import track

from speccascade_jax.config import Task
from speccascade_jax.inference.inputs import read_lines
from speccascade_jax.inference.outputs import whole_lines
from speccascade_jax.inference.text import Cascade
from speccascade_jax.training.data import joined_examples

Array = jax.Array


def kl_divergence(teacher: Array, student: Array) -> Array:
    """KL(teacher || student) of log-probabilities [..., V]."""
    return jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)


def total_variation(teacher: Array, student: Array) -> Array:
    """Half the L1 distance of log-probabilities [..., V]: the probability that lossless
    speculative sampling rejects a draft of the student's."""
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(teacher) - jnp.exp(student)), axis=-1)


DIVERGENCES = {"kl": kl_divergence, "tv": total_variation}


def distillation_loss(logits: Array, teacher_logits: Array, target_length: Array, divergence: str) -> Array:
    """Sum over real tokens of the divergence from the teacher's distribution (token-level
    distillation: Kim & Rush 2016; for drafters: DistillSpec, Zhou et al. 2024).

    logits and teacher_logits [B, T, V], target_length [B].
    """
    teacher, student = (jax.nn.log_softmax(x, axis=-1) for x in (teacher_logits, logits))
    mask = jnp.arange(logits.shape[1]) < target_length[:, None]
    return jnp.sum(DIVERGENCES[divergence](teacher, student) * mask)


def write_outputs(teacher: Cascade, task: Task, path: Path, count: int | None = None,
                  batch_size: int = 64) -> None:
    """Decodes the training inputs (the first `count` of them, joined and shuffled) greedily with the
    teacher into the .jsonl `path` (sequence-level distillation: Kim & Rush 2016; BiLD's prediction
    alignment).

    Inputs are joined as in training; those that the teacher does not finish within its limits are
    left out. Nothing is done where `path` exists; killed and called again, it goes on where it stopped.
    """
    if path.is_file():
        return
    examples = [source for source, _ in joined_examples(task, task.train)][:count]
    part = path.with_name(path.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    done = whole_lines(part)
    outputs = teacher.generate(examples[done:], method="verifier", batch_size=batch_size, truncate=True,
                               first_index=done)
    with part.open("a", encoding="utf-8") as file:
        for output in track(outputs, "teacher's outputs", total=len(examples), completed=done):
            finished = not output.truncated and output.tokens[-1:] == [teacher.tokenizer.eos_id]
            line = {"source": output.source, "target": output.text} if finished else None
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    kept = [line for line in read_lines(part) if line != "null"]
    whole = path.with_name(path.name + ".whole")
    whole.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    whole.rename(path)
    part.unlink()


def distilled(task: Task, path: Path) -> Task:
    """`task` with the teacher's outputs for its training split."""
    return dataclasses.replace(task, train=str(path), source_field="source", target_field="target", join=1)
