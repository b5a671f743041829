"""The learned rule: `opt` with its estimate of what deferring gains corrected by a small network.

    delta = gain(q, p) > alpha TV(p~, q~),    gain = max p - max q + network(features of q and p)

The features are known at a position before its token is drawn, so that pi is a distribution as any
per-position rule's, and the output follows it exactly. A network of zeros is `opt`.
training.router trains it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from speccascade_jax.core.methods import METHODS, Method
from speccascade_jax.core.rules import Scores, entropy, target_probs, total_variation
from speccascade_jax.core.typing import AnyArray
from speccascade_jax.inference.settings import Settings

Array = jax.Array
NAME = "router"
FEATURES = ("max q", "max p", "H(q)", "H(p)", "TV(p, q)", "q at max p", "p at max q")


class Weights(NamedTuple):
    """Of one hidden layer of W units."""

    hidden: Any  # [F, W]
    bias: Any    # [W]
    out: Any     # [W]


def features(q: Float[Array, "*B V"], p: Float[Array, "*B V"]) -> Float[Array, "*B F"]:
    """FEATURES of the models' own distributions at each position."""
    best_q, best_p = (jnp.max(x, axis=-1, keepdims=True) for x in (q, p))
    crossed = [jnp.max(jnp.where(own == best, other, 0.0), axis=-1, keepdims=True)
               for own, best, other in ((p, best_p, q), (q, best_q, p))]
    return jnp.concatenate([best_q, best_p, entropy(q), entropy(p), total_variation(p, q), *crossed], axis=-1)


def gain(weights: Weights, features: Float[AnyArray, "*B F"]) -> Float[Array, "*B"]:
    """By how much the drafter's expected loss exceeds the verifier's, as the network estimates it."""
    network = jnp.tanh(features @ weights.hidden + weights.bias) @ weights.out
    return features[..., 1] - features[..., 0] + network


def method_of(weights: Weights) -> Method:
    """The rule of a trained network."""
    def target(s: Scores, alpha: Any) -> tuple[Array, Array]:
        threshold = alpha * total_variation(s.p_sampled, s.q_sampled)
        delta = gain(weights, features(s.q, s.p))[..., None] > threshold
        return target_probs(s.q_sampled, s.p_sampled, delta), delta

    return dataclasses.replace(METHODS[NAME], target=target, name=NAME)


def described(weights: Weights, **about: Any) -> str:
    """The content of a router's file."""
    arrays = {name: np.asarray(value, np.float64).tolist() for name, value in weights._asdict().items()}
    return json.dumps({"features": FEATURES, **arrays, "about": about}, indent=1) + "\n"


def load(path: str | Path) -> Method:
    """The rule of a file that scripts/finetune.py has written. Raises ValueError for any other file."""
    try:
        found = json.loads(Path(path).read_text())
        weights = Weights(*(np.array(found[name], np.float32) for name in Weights._fields))
        units = weights.bias.shape
        fits = (tuple(found["features"]) == FEATURES and weights.hidden.shape == (len(FEATURES), *units)
                and weights.out.shape == units and all(np.isfinite(x).all() for x in weights))
    except OSError as error:
        raise ValueError(f"router is {path}, which cannot be read: {error.strerror}.") from None
    except (ValueError, LookupError, TypeError, RecursionError):
        fits = False
    if not fits:
        raise ValueError(f"router is {path}, which is no router's file: train one with scripts/finetune.py.")
    return method_of(weights)


def with_router(settings: Settings, router: Method | None) -> Settings:
    """The settings with the trained rule where they name it. Raises ValueError where there is none."""
    method = settings.method
    names = tuple(method.split("+")) if isinstance(method, str) else method
    names = names if isinstance(names, tuple) else ()
    if NAME not in names:
        return settings
    if router is None:
        raise ValueError("method router is a trained network: give its file with --router; "
                         "scripts/finetune.py trains one.")
    found = tuple(router if name == NAME else name for name in names)
    return dataclasses.replace(settings, method=found if len(found) > 1 else found[0])
