"""Fine-tuning: the step, the optimizers, the loop that survives being killed."""

import dataclasses
import math
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import huggingface, native, t5x, tokenizer_files
from speccascade_jax.checkpoints.arrays import Placement, Sharding
from speccascade_jax.config import TrainConfig
from speccascade_jax.evaluation.quality import METRICS
from speccascade_jax.inference.text import Cascade
from speccascade_jax.inference.tokenizer import Tokenizer, pad, train_tokenizer
from speccascade_jax.models import Config, Model, model_of
from speccascade_jax.parallel import make_mesh, parameter_sharding, split_rows, tree_sharding
from speccascade_jax.training import distillation
from speccascade_jax.training.data import Batch, TrainingBatches, joined_examples, texts
from speccascade_jax.training.distillation import DIVERGENCES, distillation_loss
from speccascade_jax.training.reporting import Reporter, loss_curve

Array = jax.Array


def scale_by_parameter_rms() -> optax.GradientTransformation:
    """Updates multiplied by their parameter array's root mean square, at least 1e-3.

    Adafactor's parameter scaling without its factored second moment: T5's embeddings start at 1
    and its queries at (D K)^-1/2, and one learning rate has to fit both.
    """
    return optax.scale_by_param_block_rms(min_scale=1e-3)


def check(config: TrainConfig) -> None:
    """Raises ValueError for a name that is none; better now than at the first evaluation."""
    for what, value, known in (("optimizer", config.optimizer, ("adafactor", "adamw")),
                               ("decay", config.decay, ("constant", "linear")),
                               ("divergence", config.divergence, DIVERGENCES),
                               ("metric", config.task.metric, METRICS),
                               ("dtype", config.dtype, ("bfloat16", "float32"))):
        if value not in known:
            raise ValueError(f"unknown {what} {value!r}: {', '.join(known)}.")
    for name in ("steps", "batch_tokens", "accumulate", "eval_every", "save_every", "log_every"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 1.")
    if config.teacher_outputs is not None and config.teacher is None:
        raise ValueError("teacher_outputs are decoded by a teacher: give its checkpoint with --teacher.")


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """The config's optimizer. Adafactor is set as in the T5 papers: parameter scaling, no momentum."""
    end = 0.0 if config.decay == "linear" else config.learning_rate
    rate = optax.linear_schedule(config.learning_rate, end, max(config.steps - config.warmup_steps, 1))
    if config.warmup_steps:
        warmup = optax.linear_schedule(config.learning_rate / config.warmup_steps, config.learning_rate,
                                       config.warmup_steps)
        rate = optax.join_schedules([warmup, rate], [config.warmup_steps])
    if config.optimizer == "adafactor":
        optimizer = optax.adafactor(rate, multiply_by_parameter_scale=True, clipping_threshold=1.0)
    else:
        optimizer = optax.chain(optax.scale_by_adam(b1=0.9, b2=0.98), scale_by_parameter_rms(),
                                optax.add_decayed_weights(config.weight_decay),
                                optax.scale_by_learning_rate(rate))
    if config.clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)


def token_loss(logits: Array, target: Array, target_length: Array, *, label_smoothing: float = 0.0,
               z_loss: float = 0.0) -> tuple[Array, Array]:
    """Sum over real tokens of the cross-entropy (+ z_loss * log Z^2), and their number.

    logits [B, T, V], target [B, T]; natural logarithms.
    """
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    expected = (1.0 - label_smoothing) * chosen + label_smoothing * jnp.mean(logits, axis=-1)
    mask = jnp.arange(target.shape[1]) < target_length[:, None]
    losses = log_z - expected + z_loss * jnp.square(log_z)
    return jnp.sum(losses * mask), jnp.sum(mask)


class Steps(NamedTuple):
    """The jitted pieces of a training step."""

    gradients: Callable[..., Any]  # (params, batch, number, teacher_params) -> summed gradients, loss, tokens
    update: Callable[..., Any]     # (params, opt_state, gradients, tokens) -> params, opt_state, their norm
    losses: Callable[..., Any]     # (params, batch) -> summed loss, tokens


def make_steps(model: Model, config: TrainConfig, optimizer: optax.GradientTransformation, mesh: Mesh,
               teacher: Model | None = None) -> Steps:
    """Gradients are summed over tokens, so that batches of several sizes add up to one step.

    Dropout is a function of (seed, the batch's number).
    """

    def forward(model, params, batch, key=None):
        return model.forced(params, batch.source, batch.source_length, batch.target, key)

    def gradients(params, batch: Batch, number, teacher_params):
        def loss_sum(params):
            key = jax.random.fold_in(jax.random.key(config.seed, impl="rbg"), number)
            logits = forward(model, params, batch, key)
            total, count = token_loss(logits, batch.target, batch.target_length,
                                      label_smoothing=config.label_smoothing, z_loss=config.z_loss)
            if teacher is not None and config.distillation:
                distilled = distillation_loss(logits, forward(teacher, teacher_params, batch),
                                              batch.target_length, config.divergence)
                total = (1.0 - config.distillation) * total + config.distillation * distilled
            return total, count

        (loss, count), grads = jax.value_and_grad(loss_sum, has_aux=True)(params)
        return grads, loss, count

    def update(params, opt_state, grads, count):
        grads = jax.tree.map(lambda g: g / count, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, optax.tree.norm(grads)

    def losses(params, batch):
        return token_loss(forward(model, params, batch), batch.target, batch.target_length)

    shapes = model.abstract_params()
    at = tree_sharding(mesh, shapes, config.split_parameters)
    opt_at = tree_sharding(mesh, jax.eval_shape(optimizer.init, shapes), config.split_parameters)
    whole = parameter_sharding(mesh, (), split=False)
    return Steps(jax.jit(gradients, out_shardings=(at, whole, whole)),
                 jax.jit(update, out_shardings=(at, opt_at, whole), donate_argnums=(0, 1)),
                 jax.jit(losses, out_shardings=whole))


def find_tokenizer(config: TrainConfig) -> Path:
    """The file of the config's tokenizer: that of config.init where none is named, fetched where it lies
    at gs://, trained on the task's training split where it is missing."""
    run = Path(config.output_dir)
    if config.tokenizer is None:
        if config.init is None:
            raise ValueError("training from scratch needs a tokenizer: name its file with --tokenizer; it is "
                             "trained on the task where it is missing.")
        return checkpoints.tokenizer_file(config.init)
    if config.tokenizer.startswith("gs://"):
        path = run / tokenizer_files.name_for(config.tokenizer)
        if not path.is_file():
            run.mkdir(parents=True, exist_ok=True)
            path.write_bytes(t5x.read_file(config.tokenizer))
        return path
    path = Path(config.tokenizer)
    if not path.is_file():
        train_tokenizer((text for source, target, _ in texts(config.task, config.task.train)
                         for text in (source, target)), path, config.tokenizer_size,
                        bos=config.model.family == "gemma2")
    return path


def prepare_tokenizer(config: TrainConfig) -> Tokenizer:
    """The config's tokenizer, written with the model's shape where load() looks for them."""
    run = Path(config.output_dir)
    if any((run / "latest").glob("[0-9]*")):  # it goes on with the model it began with
        checkpoints.check_shape(str(run), native.read_config(run), config.model)
    path = find_tokenizer(config)
    tokenizer = Tokenizer(path)
    if tokenizer.size > config.model.vocab_size:
        raise ValueError(f"the tokenizer {path} has {tokenizer.size} pieces, the model "
                         f"{config.model.vocab_size}: set model.vocab_size to at least that.")
    native.describe(run, config.model, path)
    return tokenizer


def validation_batches(config: TrainConfig, tokenizer: Tokenizer, rows: int) -> list[Batch]:
    """The validation split, joined as in training, padded to the task's limits, `rows` a batch."""
    task = config.task
    examples = joined_examples(task, task.validation)
    sources = tokenizer.encode_batch([task.prefix + source + task.suffix for source, _ in examples])
    targets = tokenizer.encode_batch([references[0] for _, references in examples])
    pairs = [(tokenizer.framed(s), [*t, tokenizer.eos_id]) for s, t in zip(sources, targets, strict=True)
             if len(s) < task.max_source_length and len(t) < task.max_target_length]
    if not pairs:
        raise ValueError(f"{task.validation} has no example within {task.max_source_length}/"
                         f"{task.max_target_length} tokens: raise the limits or give another split.")
    pairs += [([], [])] * (-len(pairs) % rows)  # empty rows count nothing
    batches = []
    for begin in range(0, len(pairs), rows):
        source, target = zip(*pairs[begin:begin + rows], strict=True)
        batches.append(Batch(*pad(source, task.max_source_length, tokenizer.pad_id),
                             *pad(target, task.max_target_length, tokenizer.pad_id)))
    return batches


def validation_quality(config: TrainConfig, tokenizer: Tokenizer, mesh: Mesh
                       ) -> Callable[[nnx.State], float | None]:
    """A function from parameters to task.metric of the first validation examples, decoded greedily;
    None where the config asks for no such examples."""
    task, model = config.task, model_of(config.model)
    examples = joined_examples(task, task.validation)[:config.validation_examples]
    gather = jax.jit(lambda params: params, out_shardings=parameter_sharding(mesh, (), split=False))

    def score(params: nnx.State) -> float | None:
        if not examples:
            return None
        params = gather(params)
        cascade = Cascade(model, model, params, params, tokenizer, task.prefix, task.max_source_length,
                          task.max_target_length, suffix=task.suffix)
        outputs = cascade.generate((source for source, _ in examples), method="verifier", batch_size=32,
                                   truncate=True)
        return METRICS[task.metric]([o.text for o in outputs], [references for _, references in examples])

    return score


def portable(value: Any) -> Any:
    """`value` with absolute paths cut to their last two parts: logs are published with weights."""
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, str) and Path(value).is_absolute():
        return "/".join(Path(value).parts[-2:])
    return value


def first_parameters(config: TrainConfig, model: Model, mesh: Mesh) -> nnx.State:
    """Those of config.init, or fresh ones, where the mesh wants them."""
    if config.init is None:
        at = tree_sharding(mesh, model.abstract_params(), config.split_parameters)
        return jax.jit(model.init, static_argnums=0, out_shardings=at)(config.seed)
    return load_placed(config.init, config, mesh, config.model).params


def placement(config: TrainConfig, mesh: Mesh) -> Sharding:
    """Where the mesh wants each parameter."""
    return lambda _, size: parameter_sharding(mesh, size, config.split_parameters)


def load_placed(path: str, config: TrainConfig, mesh: Mesh, shape: Config | None = None
                ) -> checkpoints.Checkpoint:
    """A checkpoint in float32, each array where the mesh wants it."""
    return checkpoints.load(path, sharding=placement(config, mesh), config=shape)


def load_teacher(path: str, config: TrainConfig, tokenizer: Tokenizer, mesh: Mesh
                 ) -> tuple[Model, nnx.State]:
    """The teacher in the training's dtype. Raises ValueError if its vocabulary is another."""
    checkpoint = load_placed(path, config, mesh)
    if Tokenizer(checkpoint.tokenizer_file()).pieces() != tokenizer.pieces():
        raise ValueError(f"the teacher {path} has another vocabulary than {config.name}: train both with one "
                         "tokenizer.")
    return dataclasses.replace(checkpoint.model, dtype=config.dtype), checkpoint.params


def in_turn(work: Callable[[], Any]) -> Any:
    """work() in the first process, then in the others: what it makes where it is missing is made once."""
    if jax.process_index() == 0:
        result = work()
    multihost_utils.sync_global_devices("the first process is done")
    return result if jax.process_index() == 0 else work()


def train(config: TrainConfig) -> Path:
    """Trains until config.steps and returns the run's directory; resumes where the last save ended.

    Raises ValueError where the config, its files or the loss are unusable; what was saved stays whole.
    """
    check(config)
    run, mesh = Path(config.output_dir), make_mesh()
    tokenizer = in_turn(lambda: prepare_tokenizer(config))
    model = model_of(config.model, dtype=config.dtype, remat=config.remat)
    optimizer = make_optimizer(config)
    latest, best = native.manager(run / "latest"), native.manager(run / "best", best="loss")
    step = latest.latest_step() or 0
    if step:
        place = Placement(sharding=placement(config, mesh))
        params = native.read_params(run / "latest" / str(step), model, place)
        shapes = jax.eval_shape(optimizer.init, params)
        opt_state = native.restore(latest, "optimizer", jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes,
            tree_sharding(mesh, shapes, config.split_parameters)))
    else:
        params = first_parameters(config, model, mesh)
        opt_at = tree_sharding(mesh, jax.eval_shape(optimizer.init, params), config.split_parameters)
        opt_state = jax.jit(optimizer.init, out_shardings=opt_at)(params)
    teacher, teacher_params, task = None, None, config.task
    if config.teacher is not None:
        teacher, teacher_params = load_teacher(config.teacher, config, tokenizer, mesh)
        if config.teacher_outputs is not None:
            path, writer = Path(config.teacher_outputs), Cascade(
                teacher, teacher, teacher_params, teacher_params, tokenizer, task.prefix,
                task.max_source_length, task.max_target_length, suffix=task.suffix)
            in_turn(partial(distillation.write_outputs, writer, task, path, config.teacher_examples))
            task = distillation.distilled(task, path)
    steps = make_steps(model, config, optimizer, mesh, teacher)
    rows = math.lcm(8, jax.device_count())
    validation = validation_batches(config, tokenizer, rows * -(-32 // rows))
    score = validation_quality(config, tokenizer, mesh)
    batches = TrainingBatches(task, tokenizer, config.batch_tokens, config.seed, rows).from_step(
        step * config.accumulate)
    with Reporter(run, step, config.steps, quiet=jax.process_index() > 0) as report:
        report.record("start", step, config=portable(dataclasses.asdict(config)), jax=jax.__version__,
                      device=str(jax.devices()[0]), devices=jax.device_count(), machine=platform.machine(),
                      parameters=sum(x.size for x in jax.tree.leaves(params)))
        began, pending, tokens = time.monotonic(), [], 0
        while step < config.steps:
            params, opt_state, loss, norm, count = one_step(
                steps, params, opt_state, batches, step, config.accumulate, mesh, teacher_params)
            pending.append((loss, norm))
            tokens += count
            step += 1
            last = step == config.steps
            evaluates, saves = (step % every == 0 or last for every in (config.eval_every, config.save_every))
            if step % config.log_every == 0 or evaluates or saves:
                seen = finite(pending, step, latest.latest_step())
                seconds = time.monotonic() - began
                report.record("log", step, loss=float(np.mean([loss for loss, _ in seen])),
                              gradient_norm=float(np.mean([norm for _, norm in seen])),
                              tokens_per_second=tokens / seconds, seconds=seconds)
            if evaluates:
                sums = [jax.device_get(steps.losses(params, split_rows(mesh, batch))) for batch in validation]
                total, number = np.sum(sums, axis=0)
                mean = float(total / number)
                report.record("evaluation", step, loss=mean, quality=score(params), metric=task.metric)
                native.save(best, step, {"params": nnx.to_pure_dict(params)}, {"loss": mean})
            if saves:  # after the evaluation: a kill between the two repeats it
                native.save(latest, step, {"params": nnx.to_pure_dict(params), "optimizer": opt_state})
            if step % config.log_every == 0 or evaluates or saves:
                began, pending, tokens = time.monotonic(), [], 0
    if jax.process_index() == 0:
        loss_curve(run)
        if config.export_dir is not None:
            export(run, Path(config.export_dir))
    return run


def one_step(steps: Steps, params: nnx.State, opt_state: Any, batches: Iterator[Batch], step: int,
             accumulate: int, mesh: Mesh, teacher_params: Any) -> tuple[nnx.State, Any, Array, Array, int]:
    """One update from the next `accumulate` batches: params, opt_state, loss, gradient norm, tokens."""
    sums: Any = None
    tokens = 0
    for number in range(step * accumulate, (step + 1) * accumulate):
        batch = next(batches)
        tokens += int(batch.target_length.sum())
        found = steps.gradients(params, split_rows(mesh, batch), jnp.uint32(number), teacher_params)
        sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
    grads, loss, count = sums
    params, opt_state, norm = steps.update(params, opt_state, grads, count)
    return params, opt_state, loss / count, norm, tokens


def finite(pending: list[tuple[Array, Array]], step: int, saved: int | None) -> list[tuple[float, float]]:
    """The (loss, gradient norm) of the last steps up to `step` as numbers.

    Raises ValueError naming the first step where one is not finite.
    """
    seen = jax.device_get(pending)
    for number, values in enumerate(seen, step - len(seen) + 1):
        if not np.isfinite(values).all():
            kept = f"the checkpoint of step {saved} is kept" if saved else "nothing was saved yet"
            raise ValueError(f"the loss or its gradient is not a number at step {number}; {kept}. Lower "
                             "--learning-rate, set --clip-norm, or use --dtype float32.")
    return seen


def export(run: Path, folder: Path) -> None:
    """The run's best parameters as a bfloat16 Hugging Face folder, its training log beside them."""
    huggingface.save(folder, *native.load(run, Placement()))
    for name in (*tokenizer_files.NAMES, "metrics.jsonl"):
        if (run / name).is_file():
            shutil.copyfile(run / name, folder / name)

