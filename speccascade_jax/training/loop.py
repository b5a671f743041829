"""The training loop. A run that is killed resumes from its last save when it is started again."""

import contextlib
import dataclasses
import functools
import math
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from speccascade_jax.checkpoints import huggingface, native, tokenizer_files
from speccascade_jax.checkpoints.arrays import Placement, checksum, reason
from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference.outputs import OutputFile
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models import Model, NetworkConfig, model_of
from speccascade_jax.parallel import make_mesh, parameter_sharding, split_rows, tree_sharding
from speccascade_jax.tokenizers.tokenizer import Tokenizer
from speccascade_jax.training import cards, distillation, lora
from speccascade_jax.training.checks import check, check_memory, export_folders
from speccascade_jax.training.data import Batch, TrainingBatches, joined_examples, validation_batches
from speccascade_jax.training.exits import split
from speccascade_jax.training.kept_states import KeptStates
from speccascade_jax.training.optimizer import make_optimizer
from speccascade_jax.training.preparation import first_parameters, load_teacher, placement, prepare_tokenizer
from speccascade_jax.training.reporting import Reporter, loss_curve, portable, read_events
from speccascade_jax.training.steps import Steps, make_steps, one_step
from speccascade_jax.vocabularies.matching import cut_as

Array = jax.Array
Metric = Callable[[Sequence[str], Sequence[Sequence[str]]], float]
"""(texts, references of each text) -> quality."""


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Locks `run` against training by other processes. Raises ValueError if another one holds the lock."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        file = OutputFile(run / "lock")
    except OSError as error:
        raise FieldError(
            "output_dir",
            str(run),
            "choose another one.",
            f"output_dir is {run}, which cannot be written to ({error.strerror})",
        ) from None
    except ValueError:
        raise FieldError(
            "output_dir",
            str(run),
            "wait for its end, or choose another --output-dir.",
            f"another process trains into {run} (it holds {run / 'lock'})",
        ) from None
    with file:
        try:
            yield
        finally:
            file.remove()


def in_turn(work: Callable[[], Any]) -> Any:
    """Calls work() in the first process, then in the others, so that files that it makes if missing are made
    once."""
    if jax.process_index() == 0:
        result = work()
    multihost_utils.sync_global_devices("the first process is done")
    return result if jax.process_index() == 0 else work()


def validation_quality(
    config: TrainConfig, tokenizer: Tokenizer, mesh: Mesh, metric: Metric | None
) -> Callable[[nnx.State], float | None]:
    """A function that decodes the first validation examples greedily with given parameters and returns their
    metric. It returns None without a metric or if the config asks for no such examples."""
    task, model = config.task, model_of(config.model)
    examples = joined_examples(task, task.validation)[: config.validation_examples]
    gather = jax.jit(lambda params: params, out_shardings=parameter_sharding(mesh, (), split=False))

    def score(params: nnx.State) -> float | None:
        if not examples or metric is None:
            return None
        cascade = writer_of(task, model, gather(params), tokenizer)
        outputs = cascade.generate(
            [source for source, _ in examples], method="verifier", batch_size=32, truncate=True
        )
        return metric([o.text for o in outputs], [references for _, references in examples])

    return score


def writer_of(task: Task, model: Model, params: nnx.State, tokenizer: Tokenizer) -> Cascade:
    """A model alone, as a cascade that decodes a task's inputs with `method="verifier"`."""
    return Cascade(
        (model, model),
        (params, params),
        tokenizer,
        task.prefix,
        task.max_source_length,
        task.max_target_length,
        suffix=task.suffix,
    )


def start(
    config: TrainConfig, model: Model, optimizer: Any, mesh: Mesh, latest: Any
) -> tuple[int, nnx.State, Any]:
    """The step, parameters and optimizer state of the last save, or those of a new run."""
    step = latest.latest_step() or 0

    def made(item: str, new: Callable[..., Any], *arguments: Any) -> Any:
        """Restores `item` from the last save, or returns new(*arguments)."""
        shapes = jax.eval_shape(new, *arguments)
        at = tree_sharding(mesh, shapes, config.split_parameters)
        if not step:
            return jax.jit(new, out_shardings=at)(*arguments)
        return native.restore(
            latest,
            item,
            jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, at),
        )

    if config.lora_rank or not step:  # the base of adapters is not saved
        params = first_parameters(config, model, mesh)
    else:
        place = Placement(sharding=placement(config, mesh))
        params = native.read_params(Path(config.output_dir, "latest", str(step)), model, place)
    lora.describe(config, params)
    if config.lora_rank:
        adapters = made(lora.ADAPTERS, partial(lora.fresh, config, model.abstract_params()))
        params = lora.with_adapters(params, adapters)
    return step, params, made("optimizer", optimizer.init, split(config, params)[0])


def train(config: TrainConfig, metric: Metric | None = None, ship: bool = False) -> Path:
    """Trains until config.steps and returns the run's folder. Resumes from the last save.

    metric: scores the decoded validation texts at every evaluation; config.task.metric is its name. ship: the
    best parameters also replace those bundled with the package (config.shipped). Raises ValueError if the
    config or its files are unusable or the loss diverges; earlier saves stay intact.
    """
    check(config, ship)
    if config.kept_epochs and jax.process_count() > 1:
        raise FieldError(
            "kept_epochs", config.kept_epochs, "set it to 0.", "kept_epochs is for runs of one process"
        )
    mesh, run = make_mesh(), Path(config.output_dir)
    first = jax.process_index() == 0
    with locked(run) if first else contextlib.nullcontext():
        train_locked(config, metric, mesh)
        if first:
            loss_curve(run)
            for folder in export_folders(config, ship):
                export(run, folder, config.init)
    return run


class Lessons(NamedTuple):
    """What a run learns from, and what it is judged by."""

    tokenizer: Tokenizer
    task: Task  # with the teacher's texts as targets, if it writes some
    judged: TrainConfig  # whose validation examples count
    teacher: Model | None = None
    teacher_params: nnx.State | None = None
    cut: Any = None  # how the teacher's tokenizer splits a text


def prepare_lessons(config: TrainConfig, mesh: Mesh) -> Lessons:
    """Trains the tokenizer, loads the teacher, and decodes its outputs, if the config requires them."""
    tokenizer = in_turn(lambda: prepare_tokenizer(config))
    if config.teacher is None:
        return Lessons(tokenizer, config.task, config)
    task, judged = config.task, config
    teacher, params, teacher_tokenizer = load_teacher(config.teacher, config, tokenizer, mesh)
    cut = cut_as(teacher_tokenizer, tokenizer) if config.teacher_tokens else None
    if config.teacher_outputs is not None:
        path, singles = Path(config.teacher_outputs), config.teacher_singles
        writer = writer_of(task, teacher, params, teacher_tokenizer)
        write = partial(distillation.write_outputs, writer, task, path, config.teacher_examples)
        in_turn(partial(write, singles=singles))
        task = distillation.distilled(task, path, singles)
        judged = in_turn(partial(distillation.judged_by, writer, config))
    return Lessons(tokenizer, task, judged, teacher, params, cut)


def train_locked(config: TrainConfig, metric: Metric | None, mesh: Mesh) -> None:
    """Trains, and writes the run's log and saves to its folder."""
    run = Path(config.output_dir)
    rows = math.lcm(8, jax.device_count())
    validation_rows = rows * -(-32 // rows)
    check_memory(config, validation_rows)
    tokenizer, task, judged, teacher, teacher_params, cut = prepare_lessons(config, mesh)
    score = validation_quality(config, tokenizer, mesh, metric)
    validation = validation_batches(judged, tokenizer, validation_rows, cut)
    data = TrainingBatches(
        task, tokenizer, config.batch_tokens, config.seed, rows, cut=cut, epochs=config.kept_epochs or None
    )
    model = model_of(config.model, dtype=config.dtype, remat=config.remat)
    optimizer = make_optimizer(config)
    latest, best = native.manager(run / "latest"), native.manager(run / "best", best="loss")
    step, params, opt_state = start(config, model, optimizer, mesh, latest)
    batches = data.from_step(step * config.accumulate)
    steps = make_steps(model, config, optimizer, mesh, teacher, tokenizer.eos_id)
    store = states_of(config, data, steps, params, teacher_params) if config.kept_epochs else None
    merged = lora.merging(config, mesh)
    with Reporter(run, step, config.steps, quiet=jax.process_index() > 0) as report:
        record_start(report, step, config, params)
        began, pending, tokens = time.monotonic(), [], 0
        while step < config.steps:
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                params, opt_state, loss, norm, count = one_step(
                    steps, params, opt_state, batches, step, config, mesh, teacher_params, store
                )
            pending.append((loss, norm))
            tokens += count
            step += 1
            last = step == config.steps
            evaluates, saves = (
                step % every == 0 or last for every in (config.eval_every, save_every(config))
            )
            if not (step % config.log_every == 0 or evaluates or saves):
                continue
            kept = latest.latest_step()
            seen = finite(pending, step, kept)
            record_steps(report, step, seen, tokens, time.monotonic() - began)
            if (evaluates or saves) and not steps.finite((params, opt_state)):
                raise diverged("a parameter or the optimizer's state", step, kept)
            whole = merged(params) if evaluates or saves else params
            if evaluates:
                mean = validation_loss(steps, params, teacher_params, validation, mesh)
                if not math.isfinite(mean):
                    raise diverged("the validation loss", step, kept)
                report.record("evaluation", step, loss=mean, quality=score(whole), metric=task.metric)
                native.save(best, step, {"params": nnx.to_pure_dict(whole)}, {"loss": mean})
            if saves:  # after the evaluation, so that a kill in between repeats it
                adapters = {lora.ADAPTERS: lora.split_adapters(params)[0]} if config.lora_rank else {}
                native.save(
                    latest, step, {"params": nnx.to_pure_dict(whole), **adapters, "optimizer": opt_state}
                )
            del whole  # with adapters it is an extra copy of the model
            began, pending, tokens = time.monotonic(), [], 0
        if store is not None:
            store.remove()


def states_of(
    config: TrainConfig, data: TrainingBatches, steps: Steps, params: nnx.State, teacher_params: Any
) -> KeptStates:
    """Where the frozen model's states for config.kept_epochs epochs are kept. Checksums detect weights or
    texts that have changed under the same name."""

    @functools.cache
    def shapes(batch: Batch) -> Any:
        return jax.eval_shape(steps.frozen_states, params, batch, teacher_params)

    frozen = split(config, params)[1] if isinstance(config.model, NetworkConfig) else teacher_params
    settings = {
        "config": dataclasses.asdict(config),
        "weights": native.checksums(nnx.to_pure_dict(frozen)),
        "texts": [checksum(array) for table in (data.sources, data.targets) for array in table],
    }
    kept = [shapes(batch) for batch in data.shapes()]
    return KeptStates(Path(config.output_dir, "kept"), kept, settings)


def validation_loss(
    steps: Steps, params: nnx.State, teacher_params: Any, validation: Sequence[Batch], mesh: Mesh
) -> float:
    """The mean loss of a token of the validation batches."""
    sums = [
        jax.device_get(steps.losses(params, split_rows(mesh, batch), teacher_params)) for batch in validation
    ]
    total, number = np.sum(sums, axis=0)
    return float(total / number)


def record_start(report: Reporter, step: int, config: TrainConfig, params: nnx.State) -> None:
    report.record(
        "start",
        step,
        config=portable(dataclasses.asdict(config)),
        jax=jax.__version__,
        device=str(jax.devices()[0]),
        devices=jax.device_count(),
        machine=platform.machine(),
        parameters=sum(x.size for x in jax.tree.leaves(params)),
        trained=sum(x.size for x in jax.tree.leaves(split(config, params)[0])),
    )


def record_steps(
    report: Reporter, step: int, seen: Sequence[tuple[float, float]], tokens: int, seconds: float
) -> None:
    """Records the (loss, gradient norm) of the steps up to `step`, their tokens and their seconds."""
    report.record(
        "log",
        step,
        loss=float(np.mean([loss for loss, _ in seen])),
        gradient_norm=float(np.mean([norm for _, norm in seen])),
        tokens_per_second=tokens / seconds,
        seconds=seconds,
    )


def save_every(config: TrainConfig) -> int:
    """Steps between saves. A run of at most config.save_every steps is saved four times."""
    return config.save_every if config.save_every < config.steps else max(1, config.steps // 4)


def finite(pending: list[tuple[Array, Array]], step: int, kept: int | None) -> list[tuple[float, float]]:
    """Fetches the (loss, gradient norm) pairs of the last steps up to `step`.

    Raises ValueError with the first step at which either is not finite.
    """
    seen = jax.device_get(pending)
    for number, values in enumerate(seen, step - len(seen) + 1):
        if not np.isfinite(values).all():
            raise diverged("the loss or its gradient", number, kept)
    return seen


def diverged(what: str, step: int, kept: int | None) -> ValueError:
    saved = f"the checkpoint of step {kept} is kept" if kept else "nothing was saved yet"
    return ValueError(
        f"{what} is not a number at step {step}; {saved}. Lower --learning-rate, set "
        "--clip-norm, or use --dtype float32."
    )


def export(run: Path, folder: Path, init: str | None) -> None:
    """Exports the run's best parameters as a bfloat16 Hugging Face folder with the training log and a model
    card. A network is exported in this package's format without the full model's parameters, for which it
    refers to the folder `init`.

    Each file of an earlier export is replaced atomically. Raises ValueError if the files cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export", dir=folder) as made:
            new, (model, params) = Path(made), native.load(run, Placement())
            if isinstance(model.config, NetworkConfig):
                native.export(new, model, params, jnp.bfloat16, Path(init or "").name)
            else:
                huggingface.save(new, model, params)
            for name in (*tokenizer_files.NAMES, "metrics.jsonl"):
                if (run / name).is_file():
                    shutil.copyfile(run / name, new / name)
            if cards.is_ours(folder / "README.md"):
                events = read_events(run / "metrics.jsonl")
                (new / "README.md").write_text(
                    cards.card(run.name, cards.kind_of(new), events), encoding="utf-8"
                )
            for stale in folder.glob("model*.safetensors*"):  # an earlier export may have more shards
                if not (new / stale.name).exists():
                    stale.unlink()
            for path in new.iterdir():
                if path.is_dir():
                    shutil.rmtree(folder / path.name, ignore_errors=True)
                path.replace(folder / path.name)
    except Exception as error:  # safetensors has its own exception types for a full disk
        raise ValueError(f"cannot write {folder}: {reason(error)}; the run in {run} is whole.") from None
