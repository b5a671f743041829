"""Fine-tuning: the step, the optimizers, the loop that survives being killed."""

import dataclasses
import json
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from rich.console import Console

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import huggingface, native
from speccascade_jax.config import TrainConfig
from speccascade_jax.data import Batch, TrainingBatches, joined_examples, read_examples
from speccascade_jax.evaluation import bleu
from speccascade_jax.models.t5 import T5Model
from speccascade_jax.text import Cascade, Tokenizer, pad, train_tokenizer

Array = jax.Array


def scale_by_parameter_rms() -> optax.GradientTransformation:
    """Updates multiplied by their parameter array's root mean square, at least 1e-3.

    Adafactor's parameter scaling without its factored second moment: T5's embeddings start at 1
    and its queries at (D K)^-1/2, and one learning rate has to fit both.
    """
    return optax.scale_by_param_block_rms(min_scale=1e-3)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """The config's optimizer. Adafactor is set as in the T5 papers: parameter scaling, no momentum."""
    warmup = max(config.warmup_steps, 1)
    end = 0.0 if config.decay == "linear" else config.learning_rate
    rate = optax.join_schedules([
        optax.linear_schedule(config.learning_rate / warmup, config.learning_rate, warmup),
        optax.linear_schedule(config.learning_rate, end, max(config.steps - warmup, 1))], [warmup])
    if config.optimizer == "adafactor":
        optimizer = optax.adafactor(rate, multiply_by_parameter_scale=True, clipping_threshold=1.0)
    elif config.optimizer == "adamw":
        optimizer = optax.chain(optax.scale_by_adam(b1=0.9, b2=0.98), scale_by_parameter_rms(),
                                optax.add_decayed_weights(config.weight_decay),
                                optax.scale_by_learning_rate(rate))
    else:
        raise ValueError(f"unknown optimizer {config.optimizer!r}: adamw or adafactor.")
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


def shift_right(target: Array, start_id: int) -> Array:
    return jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=start_id)


def distillation_loss(logits: Array, teacher_logits: Array, target_length: Array) -> Array:
    """Sum over real tokens of KL(teacher || student) (token-level distillation, Kim & Rush 2016).

    logits and teacher_logits [B, T, V]; natural logarithms.
    """
    teacher, student = (jax.nn.log_softmax(x, axis=-1) for x in (teacher_logits, logits))
    mask = jnp.arange(logits.shape[1]) < target_length[:, None]
    return jnp.sum(jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1) * mask)


def make_steps(model: T5Model, config: TrainConfig, optimizer: optax.GradientTransformation,
               teacher: T5Model | None = None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(train_step, loss_sums), both jitted; dropout is a function of (seed, step)."""

    def forward(model, params, batch, key=None):
        return nnx.merge(model.graphdef(), params)(
            batch.source, batch.source_length, shift_right(batch.target, model.config.pad_id), key)

    def train_step(params, opt_state, batch: Batch, step, teacher_params):
        def mean_loss(params):
            key = jax.random.fold_in(jax.random.key(config.seed, impl="rbg"), step)
            logits = forward(model, params, batch, key)
            total, count = token_loss(logits, batch.target, batch.target_length,
                                      label_smoothing=config.label_smoothing, z_loss=config.z_loss)
            if teacher is not None:
                distilled = distillation_loss(logits, forward(teacher, teacher_params, batch),
                                              batch.target_length)
                total = (1.0 - config.distillation) * total + config.distillation * distilled
            return total / count, count

        (loss, count), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, count

    def loss_sums(params, batch):
        return token_loss(forward(model, params, batch), batch.target, batch.target_length)

    return jax.jit(train_step, donate_argnums=(0, 1)), jax.jit(loss_sums)


def prepare_tokenizer(config: TrainConfig) -> Tokenizer:
    """The config's tokenizer, trained on its task's training split where the file is missing."""
    path = Path(config.tokenizer)
    if not path.is_file():
        task = config.task
        examples = read_examples(task.train)
        train_tokenizer((e[f] for e in examples for f in (task.source_field, task.target_field)),
                        path, config.tokenizer_size)
    tokenizer = Tokenizer(path)
    if tokenizer.size > config.model.vocab_size:
        raise ValueError(f"the tokenizer {path} has {tokenizer.size} pieces, the model "
                         f"{config.model.vocab_size}: set model.vocab_size to at least that.")
    return tokenizer


def validation_batches(config: TrainConfig, tokenizer: Tokenizer, rows: int = 32) -> list[Batch]:
    """The validation split, joined as in training, padded to the task's limits."""
    task = config.task
    examples = joined_examples(task, task.validation)
    sources = tokenizer.encode_batch([task.prefix + source for source, _ in examples])
    targets = tokenizer.encode_batch([references[0] for _, references in examples])
    pairs = [([*s, tokenizer.eos_id], [*t, tokenizer.eos_id]) for s, t in zip(sources, targets, strict=True)
             if len(s) < task.max_source_length and len(t) < task.max_target_length]
    batches = []
    if not pairs:
        raise ValueError(f"{task.validation} has no example within {task.max_source_length}/"
                         f"{task.max_target_length} tokens: raise the limits or give another split.")
    for begin in range(0, len(pairs), rows):
        source, target = zip(*pairs[begin:begin + rows], strict=True)
        batches.append(Batch(*pad(list(source), task.max_source_length, tokenizer.pad_id),
                             *pad(list(target), task.max_target_length, tokenizer.pad_id)))
    return batches


def validation_bleu(config: TrainConfig, tokenizer: Tokenizer) -> Callable[[nnx.State], float]:
    """A function from parameters to the greedy BLEU of the first validation examples."""
    task, model = config.task, T5Model(config.model)
    examples = joined_examples(task, task.validation)[:config.validation_examples]

    def score(params: nnx.State) -> float:
        cascade = Cascade(model, model, params, params, tokenizer, task.prefix, task.max_source_length,
                          task.max_target_length)
        outputs = cascade.generate((source for source, _ in examples), method="verifier", batch_size=32,
                                   truncate=True)
        return bleu([output.text for output in outputs], [references for _, references in examples])

    return score


def portable(value: Any) -> Any:
    """`value` with absolute paths cut to their last two parts: logs are published with weights."""
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, str) and Path(value).is_absolute():
        return "/".join(Path(value).parts[-2:])
    return value


def train(config: TrainConfig) -> Path:
    """Trains until config.steps and returns the run's directory; resumes where the last save ended.

    Each line of <run>/metrics.jsonl is an event: start, log, evaluation.
    """
    console = Console(stderr=True)
    run = Path(config.output_dir)
    tokenizer = prepare_tokenizer(config)
    native.describe(run, config.model, Path(config.tokenizer))
    model = T5Model(config.model, dtype=config.dtype)
    params = model.init(config.seed)
    if config.init is not None:
        start = checkpoints.load(config.init)
        if dataclasses.replace(start.model.config, dropout_rate=config.model.dropout_rate) != config.model:
            raise ValueError(f"{config.init} holds a model of another shape than the config's: "
                             f"{start.model.config}.")
        params = start.params
    optimizer = make_optimizer(config)
    opt_state = optimizer.init(params)
    latest, best = native.manager(run / "latest"), native.manager(run / "best", best="loss")
    step = latest.latest_step() or 0
    if step:
        nnx.replace_by_pure_dict(params, native.restore(latest, "params", nnx.to_pure_dict(params)))
        opt_state = native.restore(latest, "optimizer", opt_state)
    metrics = (run / "metrics.jsonl").open("a")

    def record(event: str, **values: Any) -> None:
        metrics.write(json.dumps({"event": event, "step": step, **values}) + "\n")
        metrics.flush()
        console.print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                                for k, v in {"event": event, "step": step, **values}.items()
                                if not isinstance(v, dict)), highlight=False)

    record("start", config=portable(dataclasses.asdict(config)), jax=jax.__version__,
           device=str(jax.devices()[0]), machine=f"{platform.machine()}, {jax.device_count()} device(s)",
           parameters=sum(x.size for x in jax.tree.leaves(params)))
    teacher, teacher_params = None, None
    if config.teacher is not None:
        checkpoint = checkpoints.load(config.teacher)
        if Tokenizer(checkpoint.tokenizer).pieces() != tokenizer.pieces():
            raise ValueError(f"the teacher {config.teacher} has another vocabulary than {config.tokenizer}.")
        teacher = dataclasses.replace(checkpoint.model, dtype=config.dtype)
        teacher_params = checkpoint.params
    train_step, loss_sums = make_steps(model, config, optimizer, teacher)
    validation, score = validation_batches(config, tokenizer), validation_bleu(config, tokenizer)
    batches = TrainingBatches(config.task, tokenizer, config.batch_tokens, config.seed).from_step(step)
    began, losses, tokens = time.monotonic(), [], 0
    while step < config.steps:
        batch = next(batches)
        params, opt_state, loss, count = train_step(params, opt_state, batch, jnp.int32(step), teacher_params)
        losses.append(loss)
        tokens += int(count)
        step += 1
        if step % config.log_every == 0:
            seconds = time.monotonic() - began
            record("log", loss=float(np.mean(jax.device_get(losses))), tokens_per_second=tokens / seconds,
                   seconds=seconds)
            began, losses, tokens = time.monotonic(), [], 0
        last = step == config.steps
        if step % config.save_every == 0 or last:
            latest.save(step, args=ocp.args.Composite(
                params=ocp.args.StandardSave(nnx.to_pure_dict(params)),
                optimizer=ocp.args.StandardSave(opt_state)))
        if step % config.eval_every == 0 or last:
            total, number = np.sum([jax.device_get(loss_sums(params, b)) for b in validation], axis=0)
            values = {"loss": float(total / number), "bleu": score(params)}
            record("evaluation", **values)
            best.save(step, metrics=values,
                      args=ocp.args.Composite(params=ocp.args.StandardSave(nnx.to_pure_dict(params))))
    metrics.close()
    if config.export_dir is not None:
        export(run, Path(config.export_dir))
    return run


def export(run: Path, folder: Path) -> None:
    """The run's best parameters as a bfloat16 Hugging Face folder, its training log beside them."""
    huggingface.save(folder, *native.load(run))
    for name in ("spiece.model", "metrics.jsonl"):
        shutil.copyfile(run / name, folder / name)

