"""Trains the learned rules (learned.rules): a router on the value of both models' tokens (rollouts), a
mixture on teacher-forced texts."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from speccascade_jax import config as configs
from speccascade_jax.config import DecodeConfig, LearnedRuleConfig, TrainConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.protocols import AnyArray, Params
from speccascade_jax.core.rules import METHODS, Scores
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.inference.outputs import write_whole
from speccascade_jax.inference.text import Cascade
from speccascade_jax.learned.rules import (
    FEATURES,
    TV,
    Weights,
    described,
    drafters_weight,
    features,
    network,
    plain_advantage,
)
from speccascade_jax.training.data import Batch, joined_examples, validation_batches
from speccascade_jax.training.rollouts import ROWS, Replaced, Tried, logits_of, tried

Array = jax.Array
POSITIONS = 2048  # positions per training step
HELD_OUT = 5  # every fifth text is held out for evaluation
ALPHAS = np.arange(1, 20) / 20  # levels of the mixtures in training
LEAST = 1e-9  # keeps logarithms and quotients finite
FAR = 5.0  # standard deviations at which advantages are clipped
BELIEVED = 0.5  # shrinks a router's network: samples of the advantage are noisy, and `opt` is good
FLATTEST = 0.05  # least slope of the advantage, in standard deviations, over opt's estimate
Seen = TypeVar("Seen", "Observed", Tried)


class Observed(NamedTuple):
    """Observations of every real token of some texts, [N, ...]."""

    features: Any  # features of its position
    chances: Any  # [N, 2]: its probability under the drafter and the verifier
    texts: Any  # index of its text


def observed(cascade: Cascade, batches: Sequence[Batch]) -> Observed:
    """Observes every real token of `batches` at temperature 1."""

    def observe(params: tuple[Params, Params], batch: Batch) -> tuple[Array, Array]:
        q, p = (
            jax.nn.softmax(logits_of(model, weights, batch))
            for model, weights in zip((cascade.drafter, cascade.verifier), params, strict=True)
        )
        chances = [jnp.take_along_axis(x, jnp.asarray(batch.target)[..., None], axis=-1) for x in (q, p)]
        return features(Scores(q, p, q, p, jnp.asarray(False))), jnp.concatenate(chances, axis=-1)

    score, seen = jax.jit(observe), []
    for number, batch in enumerate(batches):
        real = np.arange(batch.target.shape[1]) < batch.target_length[:, None]
        texts = np.broadcast_to(number * len(real) + np.arange(len(real))[:, None], real.shape)
        known = jax.device_get(score((cascade.params[0], cascade.params[-1]), batch))
        seen.append([x[real] for x in (*known, texts)])
    return Observed._make(np.concatenate(columns) for columns in zip(*seen, strict=True))


def prices(seen: Observed) -> Float[np.ndarray, " N"]:
    """The price of a rejection at each of ALPHAS, in nats: the price at which alpha is the best constant
    weight of the drafter, the minimum in w of E[-log(w q + (1 - w) p)] + price (1 - w) E[TV]. So a network
    competes with the best constant at each alpha."""
    q, p = np.asarray(seen.chances, np.float64).T
    slopes = [np.mean((p - q) / np.maximum(w * q + (1 - w) * p, LEAST)) for w in ALPHAS]
    return np.maximum(slopes, 0) / max(np.mean(seen.features[:, TV]), LEAST)


def mixture_loss(weight: Array, price: Array, seen: Observed) -> Array:
    """The mean of -log pi of the texts' tokens plus the price times the rejection probability (1 - w) TV, for
    mixtures with weight w of q."""
    pi = weight * seen.chances[:, 0] + (1 - weight) * seen.chances[:, 1]
    return jnp.mean(-jnp.log(jnp.maximum(pi, LEAST)) + price * (1 - weight) * seen.features[:, TV])


def _fitted(seen: Seen, loss: Callable[[Weights, Seen, Array], Array], config: LearnedRuleConfig) -> Weights:
    """Fits a network by minimizing `loss` over random positions and levels of ALPHAS. Its output starts at
    0."""
    rng = np.random.default_rng(config.seed)
    weights = Weights(
        jnp.asarray(rng.normal(size=(len(FEATURES), config.width)), jnp.float32) / 3,
        jnp.zeros(config.width),
        jnp.zeros(config.width),
    )
    optimizer = optax.adam(optax.cosine_decay_schedule(config.learning_rate, config.steps))

    @jax.jit
    def step(
        weights: Weights, state: optax.OptState, seen: Seen, level: Array
    ) -> tuple[Weights, optax.OptState]:
        updates, state = optimizer.update(jax.grad(loss)(weights, seen, level), state)
        return optax.apply_updates(weights, updates), state  # type: ignore[return-value]

    state = optimizer.init(weights)
    for _ in range(config.steps):
        chosen, level = (rng.integers(0, count, POSITIONS) for count in (len(seen.texts), len(ALPHAS)))
        weights, state = step(weights, state, type(seen)._make(x[chosen] for x in seen), level)
    return jax.device_get(weights)


def fit_mixture(seen: Observed, config: LearnedRuleConfig) -> Weights:
    """Fits the network with the least mixture_loss over all of ALPHAS. It starts as `mixture`."""
    worth = jnp.asarray(prices(seen))

    def loss(weights: Weights, some: Observed, level: Array) -> Array:
        share = drafters_weight(weights, some.features, jnp.asarray(ALPHAS)[level])
        return mixture_loss(share, worth[level], some)

    return _fitted(seen, loss, config)


def fit_router(seen: Tried, config: LearnedRuleConfig) -> Weights:
    """Fits a network to the advantage by least squares, after scaling the advantage to opt's estimate, and
    multiplies its output by BELIEVED. It starts as `opt`."""
    plain = np.asarray(plain_advantage(seen.features))
    scaled = seen.advantages / max(np.std(seen.advantages), LEAST)
    slope = max(np.cov(plain, scaled)[0, 1] / max(np.var(plain), LEAST), FLATTEST)
    known = seen._replace(advantages=np.clip(scaled, -FAR, FAR).astype(np.float32))

    def loss(weights: Weights, some: Tried, level: Array) -> Array:
        estimate = plain_advantage(some.features) + network(weights, some.features)
        return jnp.mean(jnp.square(slope * estimate - some.advantages))

    weights = _fitted(known, loss, config)
    return weights._replace(out=BELIEVED * weights.out)


def errors(weights: Weights, seen: Observed) -> dict[str, float]:
    """The loss that fit_mixture() minimizes, of the network and of the `mixture` that it starts as."""
    constant, worth = Weights(*(np.zeros_like(x) for x in weights)), prices(seen)
    return {
        f"loss, {name}": float(
            np.mean(
                [
                    mixture_loss(drafters_weight(candidate, seen.features, alpha), price, seen)
                    for alpha, price in zip(ALPHAS, worth, strict=True)
                ]
            )
        )
        for name, candidate in (("network", weights), ("mixture", constant))
    }


def kept(estimate: Float[AnyArray, " N"], seen: Tried, share: float = 0.5) -> float:
    """The metric's gain, per text and tried position, if the `share` of positions with the largest estimates
    take the verifier's token and the others the drafter's."""
    chosen = np.asarray(estimate) >= np.quantile(estimate, 1 - share)
    return float(np.mean(seen.advantages * chosen))


def gains(weights: Weights, seen: Tried) -> dict[str, float]:
    """The quality of the deferrals of the network and of `opt` at the same number of rejections: the
    correlation of the estimate with the advantage, and the gain by kept()."""
    figures = dict[str, float]()
    plain = plain_advantage(seen.features)
    for name, estimate in (("network", plain + network(weights, seen.features)), ("opt", plain)):
        correlation = np.corrcoef(estimate, seen.advantages)[0, 1]
        figures[f"correlation with the advantage, {name}"] = float(correlation)
        figures[f"gain from deferring half, {name}"] = kept(estimate, seen)
    return {**figures, "gain from deferring all": float(np.mean(seen.advantages))}


def improves(figures: dict[str, float]) -> bool:
    """Whether a network's gains() or errors() are better than those of the rule that it starts as."""
    if (learned := figures.get("gain from deferring half, network")) is not None:
        return learned > figures["gain from deferring half, opt"]
    return figures["loss, network"] < figures["loss, mixture"]


def sampling_of(config: LearnedRuleConfig) -> list[SamplingOptions]:
    """All pairs of temperature and top-p; a temperature of 0 occurs once."""
    return [
        SamplingOptions(temperature, top_p=None if top_p == 1 else top_p)
        for temperature in config.temperatures
        for top_p in (config.top_ps if temperature > 0 else (1.0,))
    ]


def train_rule(config: LearnedRuleConfig, replaced: Replaced) -> dict[str, float]:
    """Trains a network for config.pair, writes it to config.output, and returns its quality on held-out
    texts: gains() of a router, errors() of a mixture. replaced: evaluation.quality.replaced. It takes
    minutes, and a killed run starts over.

    Raises FieldError if the config, its pair or its texts are unusable.
    """
    pair: DecodeConfig = configs.load(config.pair, DecodeConfig)
    name = config.task or pair.task
    if name is None:
        raise FieldError(
            "task",
            None,
            f"name the training config whose texts the {config.method} of {config.pair} learns from.",
            "task is missing",
        )
    training: TrainConfig = configs.load(name, TrainConfig)
    cascade = Cascade.from_config(dataclasses.replace(pair, router=None, dtype=config.dtype))
    if cascade.levels != 1 or cascade.foreign:
        raise FieldError("pair", config.pair, "a learned rule needs two models of one vocabulary.")
    task = dataclasses.replace(training.task, validation=getattr(training.task, config.split))

    def parts(seen: Seen) -> tuple[Seen, Seen]:
        held = seen.texts % HELD_OUT == 0
        if min(held.sum(), (~held).sum()) < 2:  # one text has no correlation
            raise FieldError(
                "split",
                config.split,
                "choose another split.",
                f"the {config.split} split has too few texts to learn from",
            )
        first, second = (type(seen)._make(x[mask] for x in seen) for mask in (~held, held))
        return first, second

    if METHODS[config.method].defers:  # a router learns when to defer, a mixture its weights
        examples = joined_examples(task, task.validation)[: config.examples]
        tries, others = parts(tried(cascade, task.metric, examples, sampling_of(config), config, replaced))
        weights = fit_router(tries, config)
        figures, count = gains(weights, others), len(tries.texts)
    else:
        batches = validation_batches(dataclasses.replace(training, task=task), cascade.tokenizer, ROWS)
        learnt, rest = parts(observed(cascade, batches[: -(-config.examples // ROWS)]))
        weights = fit_mixture(learnt, config)
        figures, count = errors(weights, rest), len(learnt.texts)
    write_whole(
        Path(config.output),
        described(
            weights,
            config.method,
            pair=config.pair,
            task=name,
            split=config.split,
            positions=count,
            held_out=figures,
        ),
    )
    return figures
