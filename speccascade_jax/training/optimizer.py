"""The optimizers: Adafactor with the T5 papers' settings, and AdamW and Muon with Adafactor's update
scaling."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from speccascade_jax.config import TrainConfig

ADAM_RMS = 0.2
"""The typical root mean square of Adam's updates. Muon's are scaled to it, so that both use the same learning
rates (Moonlight, arXiv 2502.16982, section 2.2)."""


def scale_by_parameter_rms() -> optax.GradientTransformation:
    """Multiplies updates by the root mean square of their parameter array, at least 1e-3.

    This is Adafactor's parameter scaling without its factored second moment. One learning rate has to suit
    T5's embeddings, which start at 1, and its queries, which start at (D K)^-1/2.
    """
    return optax.scale_by_param_block_rms(min_scale=1e-3)


def _adam() -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=0.9, b2=0.98)


NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315
"""The coefficients of x, x^3 and x^5 in a Newton-Schulz step (Jordan et al. 2024)."""


def _kinds(params: Any) -> Any:
    """Labels each array "matrix" (a layer's kernel) or "other" (embeddings, the head, scales, biases)."""

    def kind(path: tuple[Any, ...], array: jax.Array) -> str:
        names = jax.tree_util.keystr(path)
        return "matrix" if array.ndim == 2 and "kernel" in names and "head" not in names else "other"

    return jax.tree_util.tree_map_with_path(kind, params)


def orthogonal(x: jax.Array, dtype: Any) -> jax.Array:
    """Brings the singular values of a matrix [m, n] near 1 by five Newton-Schulz steps (Jordan et al. 2024).

    Products have operands in `dtype` and sums in float32. Those of optax.contrib have one dtype for both; in
    bfloat16, CPUs do not run them on their matrix units, and they take longer than a step's gradients.
    """

    def product(a: jax.Array, b: jax.Array, contracted: int = 0) -> jax.Array:
        over = (((1,), (contracted,)), ((), ()))
        return lax.dot_general(a.astype(dtype), b.astype(dtype), over, preferred_element_type=jnp.float32)

    def step(_: jax.Array, x: jax.Array) -> jax.Array:
        gram, (first, third, fifth) = product(x, x, contracted=1), NEWTON_SCHULZ
        return first * x + product(third * gram + fifth * product(gram, gram), x)

    wide = x if x.shape[0] <= x.shape[1] else x.T  # of the two, its Gram matrix is smaller
    wide = lax.fori_loop(0, 5, step, wide / (jnp.linalg.norm(wide) + 1e-8))
    return wide if wide.shape == x.shape else wide.T


def _muon(dtype: Any) -> optax.GradientTransformation:
    """Orthogonalized Nesterov momentum (Jordan et al. 2024) for the layers' matrices; Adam for the rest.

    An orthogonal matrix [m, n] has a root mean square of max(m, n)^-1/2.
    """

    def orthogonal_as_large_as_adams(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda x: ADAM_RMS * jnp.sqrt(max(x.shape)) * orthogonal(x, dtype), updates)

    matrices = optax.chain(
        optax.trace(decay=0.95, nesterov=True), optax.stateless(orthogonal_as_large_as_adams)
    )
    return optax.partition({"matrix": matrices, "other": _adam()}, _kinds)


def _with_decay(direction: Callable[[TrainConfig], optax.GradientTransformation]) -> Callable[..., Any]:
    """An optimizer with decoupled weight decay. If `scaled`, updates are scaled by their parameter arrays."""

    def make(config: TrainConfig, rate: optax.Schedule, scaled: bool) -> optax.GradientTransformation:
        return optax.chain(
            direction(config),
            scale_by_parameter_rms() if scaled else optax.identity(),
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(rate),
        )

    return make


def _adafactor(config: TrainConfig, rate: optax.Schedule, scaled: bool) -> optax.GradientTransformation:
    """Adafactor with the T5 papers' settings: parameter scaling, no momentum."""
    return optax.adafactor(rate, multiply_by_parameter_scale=scaled, clipping_threshold=1.0)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adafactor": _adafactor,
    "adamw": _with_decay(lambda config: _adam()),
    "muon": _with_decay(lambda config: _muon(jnp.dtype(config.dtype))),
}


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """The config's optimizer, preceded by gradient clipping.

    Updates of adapters are not scaled by their arrays, half of which start at 0.
    """
    end = 0.0 if config.decay == "linear" else config.learning_rate
    rate = optax.linear_schedule(config.learning_rate, end, max(config.steps - config.warmup_steps, 1))
    if config.warmup_steps:
        warmup = optax.linear_schedule(
            config.learning_rate / config.warmup_steps, config.learning_rate, config.warmup_steps
        )
        rate = optax.join_schedules([warmup, rate], [config.warmup_steps])
    optimizer = OPTIMIZERS[config.optimizer](config, rate, scaled=not config.lora_rank)
    if config.clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
