"""The data loss."""

import jax
import jax.numpy as jnp

from speccascade_jax.core.protocols import AnyArray

Array = jax.Array


def token_loss(
    logits: Array,
    target: AnyArray,
    target_length: AnyArray,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Array, Array]:
    """The sum over real tokens of the cross-entropy (+ z_loss * log Z^2), and the number of tokens.

    logits [B, T, V], target [B, T]; natural logarithms.
    """
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    expected = (1.0 - label_smoothing) * chosen + label_smoothing * jnp.mean(logits, axis=-1)
    mask = jnp.arange(target.shape[1]) < target_length[:, None]
    losses = log_z - expected + z_loss * jnp.square(log_z)
    return jnp.sum(losses * mask), jnp.sum(mask)
