"""Training the methods that learn (inference.router) on teacher-forced texts."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from speccascade_jax import config as configs
from speccascade_jax.config import DecodeConfig, RouterConfig, TrainConfig
from speccascade_jax.core.rules import Scores
from speccascade_jax.core.sampling import token_probs
from speccascade_jax.core.typing import LanguageModel, Params, SamplingOptions
from speccascade_jax.inference.outputs import write_whole
from speccascade_jax.inference.router import (
    FEATURES,
    Weights,
    described,
    drafters_weight,
    features,
    gain,
    plain_gain,
)
from speccascade_jax.inference.text import Cascade
from speccascade_jax.training.data import Batch, validation_batches
from speccascade_jax.training.distillation import own_texts

Array = jax.Array
ROWS = 16     # texts that are scored at once
POSITIONS = 4096  # of a training step
PLAIN = SamplingOptions(1.0)
HELD_OUT = 5  # every fifth text is for measuring only
ALPHAS = np.arange(1, 20) / 20  # of the mixtures that are learnt
TV = FEATURES.index("TV(p, q)")
LEAST = 1e-9  # keeps logarithms and quotients finite


def logits_of(model: LanguageModel, params: Params, batch: Batch) -> Array:
    """The model's logits [B, T, V] at each of the texts' tokens, given those before it."""
    length = batch.source.shape[1] + batch.target.shape[1] + 1
    source, source_length = jnp.asarray(batch.source), jnp.asarray(batch.source_length)
    prefix, cache = model.prefill(params, source, source_length, length)
    last = jnp.take_along_axis(prefix.tokens, jnp.maximum(prefix.length - 1, 0)[:, None], axis=1)
    tokens = jnp.concatenate([last, batch.target[:, :-1]], axis=1)
    return model.extend(params, tokens, cache)[0]


class Observed(NamedTuple):
    """Of every real token of some texts, [N, ...]."""

    features: Any  # of its position
    gains: Any     # how much likelier the text's token is to be drawn from p~ than from q~: how far deferring
                   # lowers the expected 0-1 loss
    chances: Any   # [N, 2]: how likely it is to the drafter, and to the verifier
    texts: Any     # the number of its text


def both(*seen: Observed) -> Observed:
    return Observed._make(np.concatenate(parts) for parts in zip(*seen, strict=True))


def observed(cascade: Cascade, batches: Sequence[Batch], sampling: Sequence[SamplingOptions] = (PLAIN,)
             ) -> Observed:
    """What is known of the tokens of `batches`, sampled in each of these ways: one after the other."""
    def one(params: tuple[Params, Params], batch: Batch) -> list[tuple[Array, Array, Array]]:
        q, p = (logits_of(model, own, batch) for model, own in zip(cascade.models, params, strict=True))

        def chance(x: Array) -> Array:
            return jnp.take_along_axis(x, jnp.asarray(batch.target)[..., None], axis=-1)

        found = []
        for options in sampling:
            s = Scores(jax.nn.softmax(q), jax.nn.softmax(p), token_probs(q, options), token_probs(p, options),
                       jnp.asarray(options.temperature <= 0))
            chances = jnp.concatenate([chance(s.q), chance(s.p)], axis=-1)
            found.append((features(s), (chance(s.p_sampled) - chance(s.q_sampled))[..., 0], chances))
        return found

    score, found = jax.jit(one), []
    for number, batch in enumerate(batches):
        real = np.arange(batch.target.shape[1]) < batch.target_length[:, None]
        texts = np.broadcast_to(number * len(real) + np.arange(len(real))[:, None], real.shape)
        for own in jax.device_get(score((cascade.params[0], cascade.params[-1]), batch)):
            found.append([x[real] for x in (*own, texts)])
    return both(*map(Observed._make, found))


def gain_loss(estimate: Array, seen: Observed) -> Array:
    """The squared error of an estimated gain, least where that is its expectation given the features."""
    return jnp.mean(jnp.square(estimate - seen.gains))


def prices(seen: Observed) -> Float[np.ndarray, " N"]:
    """What a rejection is worth at each of ALPHAS, in nats: at this price alpha is the best of all constant
    weights of the drafter, where E[-log(w q + (1 - w) p)] + price (1 - w) E[TV] has its minimum in w. So a
    network is compared with the best constant at each alpha."""
    q, p = np.asarray(seen.chances, np.float64).T
    slopes = [np.mean((p - q) / np.maximum(w * q + (1 - w) * p, LEAST)) for w in ALPHAS]
    return np.maximum(slopes, 0) / max(np.mean(seen.features[:, TV]), LEAST)


def mixture_loss(weight: Array, price: Array, seen: Observed) -> Array:
    """-log pi of the texts' tokens plus the price of being rejected, (1 - w) TV, of the mixtures with these
    weights of q."""
    pi = weight * seen.chances[:, 0] + (1 - weight) * seen.chances[:, 1]
    return jnp.mean(-jnp.log(jnp.maximum(pi, LEAST)) + price * (1 - weight) * seen.features[:, TV])


def fit(seen: Observed, config: RouterConfig) -> Weights:
    """The network of least loss: gain_loss, or mixture_loss at alphas drawn from ALPHAS. It begins as a
    network of zeros: as `opt` or `mixture`."""
    rng = np.random.default_rng(config.seed)
    weights = Weights(jnp.asarray(rng.normal(size=(len(FEATURES), config.width)), jnp.float32) / 3,
                      jnp.zeros(config.width), jnp.zeros(config.width))
    optimizer = optax.adam(optax.cosine_decay_schedule(config.learning_rate, config.steps))
    worth = prices(seen)

    @jax.jit
    def step(weights: Weights, state: optax.OptState, seen: Observed, alpha: Array, price: Array
             ) -> tuple[Weights, optax.OptState]:
        def loss(weights: Weights) -> Array:
            if config.method == "router":
                return gain_loss(gain(weights, seen.features), seen)
            return mixture_loss(drafters_weight(weights, seen.features, alpha), price, seen)

        updates, state = optimizer.update(jax.grad(loss)(weights), state)
        return optax.apply_updates(weights, updates), state  # type: ignore[return-value]

    state = optimizer.init(weights)
    for _ in range(config.steps):
        chosen, level = (rng.integers(0, most, POSITIONS) for most in (len(seen.gains), len(ALPHAS)))
        some = Observed._make(x[chosen] for x in seen)
        weights, state = step(weights, state, some, ALPHAS[level], worth[level])
    return jax.device_get(weights)


def errors(weights: Weights, seen: Observed, config: RouterConfig) -> dict[str, float]:
    """The loss that fit() lowers: of the network, of what it begins as, and for a gain of its mean."""
    if config.method == "router":
        own = {"network": gain(weights, seen.features), "opt": seen.features[:, 1] - seen.features[:, 0],
               "plain": plain_gain(seen.features), "mean": seen.gains.mean()}
        return {name: float(gain_loss(estimate, seen)) for name, estimate in own.items()}
    constant, worth = Weights(*(np.zeros_like(x) for x in weights)), prices(seen)
    return {name: float(np.mean([mixture_loss(drafters_weight(own, seen.features, alpha), price, seen)
                                 for alpha, price in zip(ALPHAS, worth, strict=True)]))
            for name, own in (("network", weights), ("mixture", constant))}


def translated(cascade: Cascade, batches: Sequence[Batch]) -> list[Batch]:
    """The batches with what the verifier writes greedily in place of their targets.

    A text's own words alone teach too little: where both models would go on well in words of their own, its
    token tells nothing of them, and in decoding no prefix is the text's own.
    """
    write = jax.jit(partial(own_texts, cascade.models[-1], key=jax.random.key(0),
                            eos_id=cascade.tokenizer.eos_id, temperature=0.0))
    return [jax.device_get(write(cascade.params[-1], batch=batch)) for batch in batches]


def sampling_of(config: RouterConfig) -> list[SamplingOptions]:
    """Each temperature with each top-p, once where it is greedy; a mixture is learnt at temperature 1."""
    if config.method == "learned_mixture":
        return [PLAIN]
    return [SamplingOptions(temperature, None if top_p == 1 else top_p) for temperature in config.temperatures
            for top_p in (config.top_ps if temperature > 0 else (1.0,))]


def train_router(config: RouterConfig) -> dict[str, float]:
    """Writes the network of config.pair to config.output, and returns errors() on the texts held out. It
    takes minutes, and a killed run begins anew.

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
        raise ValueError(f"pair is {config.pair}; a network is learnt for two models of one vocabulary.")
    task = dataclasses.replace(training.task, validation=getattr(training.task, config.split))
    batches = validation_batches(dataclasses.replace(training, task=task), cascade.tokenizer, ROWS)
    batches = batches[:-(-config.examples // ROWS)]
    seen = observed(cascade, batches, sampling_of(config))
    if config.method == "router":
        seen = both(seen, observed(cascade, translated(cascade, batches), sampling_of(config)))
    held = seen.texts % HELD_OUT == 0
    if held.all():
        raise ValueError(f"the {config.split} split has too few texts to learn from: name another split.")
    learnt, rest = (Observed._make(x[mask] for x in seen) for mask in (~held, held))
    weights = fit(learnt, config)
    found = errors(weights, rest, config)
    write_whole(Path(config.output), described(weights, config.method, pair=config.pair, task=name,
                                               split=config.split, positions=len(learnt.gains), losses=found))
    return found
