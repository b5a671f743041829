"""Trains the members of a network: exits and full model together, or small members next to a frozen full
model.
"""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from speccascade_jax.config import TrainConfig
from speccascade_jax.models import (
    BlockDrafterConfig,
    ExitsConfig,
    NetworkConfig,
    full_of,
)
from speccascade_jax.models.exits import depth_of
from speccascade_jax.models.layers import AfterLayer, last_written
from speccascade_jax.training.data import Batch
from speccascade_jax.training.distillation import distillation_loss, progress
from speccascade_jax.training.lora import split_adapters
from speccascade_jax.training.losses import token_loss

Array = jax.Array
CURRICULA = "all", "rotational", "gradual"
DECAY = 0.8
"""The loss weight of a token in an EAGLE-3 head's draft, relative to that of the token before it."""


def split(config: TrainConfig, params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """The trained and the fixed parameters. Fixed are a frozen full model's, integers, and the base of
    adapters. The arrays are not copied."""
    if config.lora_rank:
        return split_adapters(params)
    if not (isinstance(config.model, NetworkConfig) and config.exits.frozen):
        return params, nnx.State({})
    trained: dict[Any, Any] = {}
    frozen: dict[Any, Any] = {}
    for path, value in nnx.to_flat_state(params):
        whole = jnp.issubdtype(value.get_value().dtype, jnp.integer)
        (frozen if path[0] == config.model.full_part or whole else trained)[path] = value
    return nnx.from_flat_state(trained), nnx.from_flat_state(frozen)


def joined(trained: nnx.State, frozen: nnx.State) -> nnx.State:
    """Joins the parts that split() returns."""
    flat = dict(nnx.to_flat_state(frozen))
    return nnx.from_flat_state(flat | dict(nnx.to_flat_state(trained))) if flat else trained


def layer_dropout(key: Array, rate: float, layers: int, rows: int) -> AfterLayer:
    """Skips layer l of each row with probability rate * (exp(l ln 2 / (layers - 1)) - 1): never the first of
    the `layers`, the last with probability `rate` (LayerSkip: Elhoushi et al. 2024, section 4.1)."""
    keys = jax.random.split(jax.random.fold_in(key, layers), layers)

    def after(number: int, before: Array, new: Array) -> Array:
        chance = rate * (math.exp(number * math.log(2) / max(layers - 1, 1)) - 1)
        left_out = jax.random.bernoulli(keys[number], chance, (rows, 1, 1))
        return jnp.where(left_out, before, new) if chance else new

    return after


def layers_of_members(model: NetworkConfig) -> tuple[int, ...]:
    """The number of layers of each small member of a network, in increasing order."""
    if isinstance(model, ExitsConfig):
        return model.layers
    return (model.num_layers if isinstance(model, BlockDrafterConfig) else depth_of(model.drafter),)


def weights(config: TrainConfig, number: Array | None) -> Array:
    """The weight of each member's loss in batch `number`, float32 [M], the full model's last; they sum to 1.
    Without a number, no exit is left out.

    If the full model is frozen, all small members have equal weights, except for a drafter that is trained on
    its own outputs, whose n-th token has weight DECAY^n. Otherwise an exit after l of L layers has the weight
    exit_weight * (1 + ... + l), the full model L - 1 + exit_weight * (1 + ... + L - 1), as in LayerSkip
    (Elhoushi et al. 2024, section 4.1) with layers counted from 1. LayerSkip has two curricula: "rotational"
    trains one exit per step, in turn; "gradual" adds one exit after another, the deepest first, until half of
    the steps are done.
    """
    exits, model = config.exits, cast(NetworkConfig, config.model)
    if model.learns_ahead:
        places = DECAY ** jnp.arange(exits.ahead)
        return jnp.append(places / jnp.sum(places), 0.0)
    layers = layers_of_members(model)
    count, depth = len(layers), depth_of(full_of(model))
    if exits.frozen:
        return jnp.array([1 / count] * count + [0.0])
    below = jnp.array([exits.exit_weight * n * (n + 1) / 2 for n in layers])
    if number is not None and exits.curriculum != "all":
        step, place = number // config.accumulate, jnp.arange(count)
        begins = (count - place) * config.steps / (2 * count)
        chosen = step % count == place if exits.curriculum == "rotational" else step >= begins
        below = jnp.where(chosen, below, 0.0)
    every = jnp.append(below, depth - 1 + exits.exit_weight * depth * (depth - 1) / 2)
    return every / jnp.sum(every)


def member_loss(
    model: Any,
    config: TrainConfig,
    params: nnx.State,
    batch: Batch,
    key: Array | None = None,
    number: Array | None = None,
    states: Any = None,
) -> tuple[Array, Array]:
    """The weighted sum of the members' losses over real tokens, and the number of tokens. `key` enables
    dropout. `states` replaces the full model's pass, full_pass().

    A small member's loss is (1 - distillation) times the data loss plus distillation times its divergence
    from the full model. The full model's loss is the data loss.
    """
    exits, train, network = config.exits, key is not None, cast(NetworkConfig, config.model)
    if exits.frozen and isinstance(config.model, ExitsConfig):
        key = None  # exits learn from the full model without dropout, as it decodes
    after: AfterLayer = last_written
    if key is not None and exits.layer_dropout:
        after = layer_dropout(key, exits.layer_dropout, depth_of(full_of(config.model)), len(batch.target))
    more = {"ahead": exits.ahead} if network.learns_ahead else {}
    texts = batch.source, batch.source_length, batch.target
    *small, full = (
        model.forced_members(params, *texts, key, after, **more)
        if states is None
        else model.member_logits(params, states, *texts, key, **more)
    )

    def data_loss(logits: Array) -> Array:
        return token_loss(
            logits,
            batch.target,
            batch.target_length,
            z_loss=config.z_loss if train else 0.0,
            label_smoothing=config.label_smoothing if train else 0.0,
        )[0]

    def small_loss(logits: Array) -> Array:
        share, total = config.distillation, jnp.zeros(())
        if share:
            total += share * distillation_loss(
                logits,
                full,
                batch.target_length,
                config.divergence,
                config.method,
                config.alpha,
                progress(config, number),
            )
        return total + (1.0 - share) * data_loss(logits) if share < 1 else total

    losses = [*map(small_loss, small), jnp.zeros(()) if exits.frozen else data_loss(full)]
    return jnp.sum(weights(config, number) * jnp.stack(losses)), jnp.sum(batch.target_length)
