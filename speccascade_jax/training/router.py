"""Training the learned rule (inference.router) on teacher-forced texts."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from speccascade_jax import config as configs
from speccascade_jax.config import DecodeConfig, RouterConfig, TrainConfig
from speccascade_jax.core.typing import LanguageModel, Params
from speccascade_jax.inference.outputs import write_whole
from speccascade_jax.inference.router import FEATURES, Weights, described, features, gain
from speccascade_jax.inference.text import Cascade
from speccascade_jax.training.data import Batch, validation_batches

Array = jax.Array
ROWS = 16     # texts that are scored at once
POSITIONS = 4096  # of a training step
HELD_OUT = 5  # every fifth text is for measuring only


def law(model: LanguageModel, params: Params, batch: Batch) -> Array:
    """The model's distributions [B, T, V] of each of the texts' tokens, given those before it."""
    length = batch.source.shape[1] + batch.target.shape[1] + 1
    source, source_length = jnp.asarray(batch.source), jnp.asarray(batch.source_length)
    prefix, cache = model.prefill(params, source, source_length, length)
    last = jnp.take_along_axis(prefix.tokens, jnp.maximum(prefix.length - 1, 0)[:, None], axis=1)
    tokens = jnp.concatenate([last, batch.target[:, :-1]], axis=1)
    return jax.nn.softmax(model.extend(params, tokens, cache)[0], axis=-1)


def observed(cascade: Cascade, batches: Sequence[Batch]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every real token: its position's features [N, F]; by how much deferring lowers the 0-1 loss there,
    1 where only the verifier's likeliest token is the text's, -1 where only the drafter's is [N]; and the
    number of its text [N]."""
    def one(params: tuple[Params, Params], batch: Batch) -> tuple[Array, Array]:
        q, p = (law(model, own, batch) for model, own in zip(cascade.models, params, strict=True))
        hits = [(jnp.argmax(x, axis=-1) == batch.target).astype(jnp.float32) for x in (p, q)]
        return features(q, p), hits[0] - hits[1]

    score, found = jax.jit(one), []
    for number, batch in enumerate(batches):
        own, gains = jax.device_get(score((cascade.params[0], cascade.params[-1]), batch))
        real = np.arange(batch.target.shape[1]) < batch.target_length[:, None]
        texts = np.broadcast_to(number * len(real) + np.arange(len(real))[:, None], real.shape)
        found.append((own[real], gains[real], texts[real]))
    whole, gains, texts = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return whole, gains, texts


def fit(whole: np.ndarray, gains: np.ndarray, config: RouterConfig) -> Weights:
    """The network whose gain() is nearest to `gains` in squared error, which their expectation given the
    features is. It begins as a network of zeros: as `opt`."""
    rng = np.random.default_rng(config.seed)
    weights = Weights(jnp.asarray(rng.normal(size=(len(FEATURES), config.width)), jnp.float32) / 3,
                      jnp.zeros(config.width), jnp.zeros(config.width))
    optimizer = optax.adam(optax.cosine_decay_schedule(config.learning_rate, config.steps))

    @jax.jit
    def step(weights: Weights, state: optax.OptState, whole: Array, gains: Array
             ) -> tuple[Weights, optax.OptState]:
        def loss(weights: Weights) -> Array:
            return jnp.mean(jnp.square(gain(weights, whole) - gains))

        updates, state = optimizer.update(jax.grad(loss)(weights), state)
        return optax.apply_updates(weights, updates), state  # type: ignore[return-value]

    state = optimizer.init(weights)
    for _ in range(config.steps):
        chosen = rng.integers(0, len(gains), POSITIONS)
        weights, state = step(weights, state, whole[chosen], gains[chosen])
    return jax.device_get(weights)


def errors(weights: Weights, whole: np.ndarray, gains: np.ndarray) -> dict[str, float]:
    """Mean squared errors of the gain as the network estimates it, as opt does, max p - max q, and of no
    estimate but its mean."""
    estimates = {"network": gain(weights, whole), "opt": whole[:, 1] - whole[:, 0], "mean": gains.mean()}
    return {name: float(np.mean(np.square(x - gains))) for name, x in estimates.items()}


def train_router(config: RouterConfig) -> dict[str, float]:
    """Writes the router of config.pair to config.output, and returns errors() on the texts held out. It takes
    minutes, and a killed run begins anew.

    Raises ValueError where the config, its pair or its texts are unusable.
    """
    pair: DecodeConfig = configs.load(config.pair, DecodeConfig)
    name = config.task or pair.task
    if name is None:
        raise ValueError(f"task is missing: name the training config whose texts the router of {config.pair} "
                         "learns from.")
    training: TrainConfig = configs.load(name, TrainConfig)
    cascade = Cascade.from_config(pair)
    if cascade.levels != 1 or cascade.foreign:
        raise ValueError(f"pair is {config.pair}; a router is learnt for two models of one vocabulary.")
    task = dataclasses.replace(training.task, validation=getattr(training.task, config.split))
    batches = validation_batches(dataclasses.replace(training, task=task), cascade.tokenizer, ROWS)
    whole, gains, texts = observed(cascade, batches[:-(-config.examples // ROWS)])
    held = texts % HELD_OUT == 0
    if held.all():
        raise ValueError(f"the {config.split} split has too few texts to learn from: name another split.")
    weights = fit(whole[~held], gains[~held], config)
    found = errors(weights, whole[held], gains[held])
    write_whole(Path(config.output), described(weights, pair=config.pair, task=name, split=config.split,
                                               positions=int((~held).sum()), squared_errors=found))
    return found
