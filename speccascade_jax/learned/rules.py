"""Learned rules: small networks that read features of both models' distributions.

    router             delta = advantage > alpha,    advantage = (max p - max q) / TV(p~, q~) + network
    learned_mixture    pi = w q~ + (1 - w) p~,       w = alpha e^network / (alpha e^network + 1 - alpha)

The advantage is the gain in quality if a text continues with the verifier's token where q~ and p~ disagree:
Q(p~'s token) - Q(q~'s token), where Q is the quality of the finished text. Deferring at a position costs a
rejection with probability TV(p~, q~), the probability of a disagreement, and gains TV times the advantage. So
if a rejection costs alpha, the best rule defers where the advantage exceeds alpha. `opt` estimates the
advantage by (max p - max q) / TV.

The features of a position are known before its token is drawn, so pi is a distribution, as for any rule per
position, and the output follows it exactly. If the network returns 0, `router` is `opt` (for alpha < 1) and
`learned_mixture` is `mixture`. training.learned_rules trains the networks.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from speccascade_jax.checkpoints.files import checked_path, read
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.methods import Method
from speccascade_jax.core.protocols import AnyArray
from speccascade_jax.core.rules import (
    METHODS,
    TRAINED,
    Scores,
    entropy,
    mixture,
    target_probs,
    total_variation,
)

Array = jax.Array
REMEDY = "train one with scripts/finetune.py."
MEANS = "q of q~'s", "p of q~'s", "q of p~'s", "p of p~'s"
FEATURES = ("max q", "max p", "H(q)", "H(p)", "TV(p~, q~)", *MEANS, *(f"log {name} / 4" for name in MEANS))
MOST_Q, MOST_P, TV = map(FEATURES.index, ("max q", "max p", "TV(p~, q~)"))
LEAST = 1e-3  # keeps logarithms and quotients finite
LARGEST_FILE = 2**20  # bytes; a network of 16 units has 6,000
LARGEST_WEIGHT = 1e6  # trained weights are smaller; sums of larger ones could overflow


class Weights(NamedTuple):
    """The weights of a network with one hidden layer of W units."""

    hidden: Any  # [F, W]
    bias: Any  # [W]
    out: Any  # [W]


def features(s: Scores) -> Float[Array, "*B F"]:
    """FEATURES of each position. Given a disagreement, the drafter's token follows (q~ - p~)+ / TV and the
    verifier's (p~ - q~)+ / TV. "p of q~'s" is the mean of p over such drafter tokens, and so on. (0 where q~
    = p~.)"""
    differs = total_variation(s.p_sampled, s.q_sampled)
    left = [jnp.maximum(x, 0.0) for x in (s.q_sampled - s.p_sampled, s.p_sampled - s.q_sampled)]
    means = [
        jnp.sum(excess * law, axis=-1, keepdims=True) / jnp.where(differs > 0, differs, 1.0)
        for excess in left
        for law in (s.q, s.p)
    ]
    peaks = [jnp.max(x, axis=-1, keepdims=True) for x in (s.q, s.p)]
    return jnp.concatenate(
        [*peaks, entropy(s.q), entropy(s.p), differs, *means, *(jnp.log(mean + LEAST) / 4 for mean in means)],
        axis=-1,
    )


def plain_advantage(features: Float[AnyArray, "*B F"]) -> Float[Array, "*B"]:
    """The quantity that `opt` compares with alpha, (max p - max q) / TV, clipped to [-1, 1]."""
    gain = features[..., MOST_P] - features[..., MOST_Q]
    return jnp.clip(gain / jnp.maximum(features[..., TV], LEAST), -1.0, 1.0)


def drafters_weight(weights: Weights, features: Float[AnyArray, "*B F"], alpha: Any) -> Float[Array, "*B"]:
    """q~'s weight in the mixture: alpha with its odds multiplied by e^network. It is 0 at alpha 0 and 1 at
    alpha 1."""
    odds = alpha * jnp.exp(jnp.clip(network(weights, features), -20, 20))
    return odds / (odds + 1 - alpha)


def network(weights: Weights, features: Float[AnyArray, "*B F"]) -> Float[Array, "*B"]:
    return jnp.tanh(features @ weights.hidden + weights.bias) @ weights.out


def method_of(weights: Weights, name: str = "router") -> Method:
    """The method `name`, one of TRAINED, with a trained network."""

    def deferring(s: Scores, alpha: Any) -> tuple[Array, Array | None]:
        inputs = features(s)
        delta = (plain_advantage(inputs) + network(weights, inputs))[..., None] > alpha
        return target_probs(s.q_sampled, s.p_sampled, delta), delta

    def mixing(s: Scores, alpha: Any) -> tuple[Array, Array | None]:
        inputs = features(s)
        alpha = jnp.broadcast_to(alpha, (*inputs.shape[:-1], 1))[..., 0]
        return mixture(s, drafters_weight(weights, inputs, alpha)[..., None])

    method = METHODS[name]
    return dataclasses.replace(method, target=deferring if method.defers else mixing)


def described(weights: Weights, name: str = "router", **about: Any) -> str:
    """The content of a network's file."""
    arrays = {field: np.asarray(value, np.float64).tolist() for field, value in weights._asdict().items()}
    return json.dumps({"method": name, "features": FEATURES, **arrays, "about": about}, indent=1) + "\n"


def load(path: str | Path) -> Method:
    """The method stored in a file that scripts/finetune.py wrote. Raises FieldError for any other file."""
    try:
        content = read(checked_path(path), LARGEST_FILE)
    except ValueError as error:
        cause = str(error).rstrip(".")
        raise FieldError(
            "router", str(path), REMEDY, f"router is {str(path)!r}, which cannot be read ({cause})"
        ) from None
    try:
        described = json.loads(content)
        weights = Weights(*(np.array(described[name], np.float64) for name in Weights._fields))
        name = described.get("method", "router")  # older files have no method
        fits = name in TRAINED and tuple(described["features"]) == FEATURES and is_network(weights)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        fits = False
    if not fits:
        raise FieldError(
            "router", str(path), REMEDY, f"router is {str(path)!r}, which is not a router's file"
        )
    return method_of(Weights(*(array.astype(np.float32) for array in weights)), name)


def is_network(weights: Weights) -> bool:
    """Whether the arrays form a network with one hidden layer and no weight beyond LARGEST_WEIGHT."""
    units = weights.bias.size
    return (
        units > 0
        and weights.hidden.shape == (len(FEATURES), units)
        and weights.bias.shape == weights.out.shape == (units,)
        and all(bool(np.all(np.abs(array) <= LARGEST_WEIGHT)) for array in weights)
    )
