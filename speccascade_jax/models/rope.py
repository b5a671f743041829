"""Rotary positions (Su et al. 2021) and their extensions beyond the trained length.

The values of `rope_type`:

    default   position times theta^(-2i/K)
    linear    all frequencies divided by `rope_factor` (Chen et al. 2023, arXiv 2306.15595)
    llama3    low ones divided by it, high ones kept, those between blended (Llama 3.1)
    yarn      the same with a ramp over i; attention sharpened (Peng et al. 2023, arXiv 2309.00071)
    dynamic   past the trained length, theta grows with the position
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
TYPES = "default", "linear", "llama3", "yarn", "dynamic"


class Turn(NamedTuple):
    """The rotation of each pair of a head's components at each position."""

    sin: Array  # [B, 1, T, K/2]
    cos: Array


def rotated(x: Array, turn: Turn) -> Array:
    """x [B, H, T, K] with its pairs (x[i], x[i + K/2]) rotated."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * turn.cos - b * turn.sin, b * turn.cos + a * turn.sin], axis=-1)


def turns(config: Any, positions: Array) -> tuple[Turn, Turn]:
    """The rotations of a DecoderConfig's global and local layers at `positions` [B, T]."""
    half = config.d_kv // 2
    steps = positions[..., None].astype(jnp.float32)
    if config.rope_type == "dynamic":
        # Each position uses the theta of a text that ends there, as in decoding token by token, so that
        # cached entries never change as the text grows.
        length = jnp.maximum(steps + 1, config.max_positions) / config.max_positions
        grown = (config.rope_factor * length - (config.rope_factor - 1)) ** (half / (half - 1))
        angle = steps * (config.rope_theta * grown) ** -(np.arange(half, dtype=np.float32) / half)
    else:
        angle = steps * frequencies(config)
    everything = turn(angle, config.rope_attention)
    if config.local_rope_theta is None:
        return everything, everything
    return everything, turn(steps * powers(config.local_rope_theta, half), 1.0)


def turn(angle: Array, scale: float) -> Turn:
    return Turn(*(scale * wave(angle)[:, None] for wave in (jnp.sin, jnp.cos)))


def powers(theta: float, half: int) -> np.ndarray:
    """theta^(-2i/K), float32 [K/2]."""
    return (1 / np.float32(theta) ** (np.arange(half, dtype=np.float32) / half)).astype(np.float32)


def partial_powers(theta: float, half: int, share: float) -> np.ndarray:
    """powers() of the first `share` of all pairs; the others are not rotated."""
    turned = int(share * 2 * half // 2)  # rounded as in transformers
    return np.where(np.arange(half) < turned, powers(theta, half), np.float32(0))


def frequencies(config: Any) -> np.ndarray:
    """The angle between adjacent positions, float32 [K/2]; for `dynamic`, within the trained length."""
    half = config.d_kv // 2
    plain = powers(config.rope_theta, half)
    if config.rope_type in ("default", "dynamic"):
        return plain
    slow = plain / config.rope_factor
    if config.rope_type == "linear":
        return slow
    length, low, high = config.rope_length or config.max_positions, config.rope_low, config.rope_high
    if config.rope_type == "llama3":
        kept = (length * plain / (2 * math.pi) - low) / (high - low)  # by rotations within the trained length
    else:
        begin, end = (
            half * math.log(length / (2 * math.pi * count)) / math.log(config.rope_theta)
            for count in (high, low)
        )
        if config.rope_truncate:
            begin, end = math.floor(begin), math.ceil(end)
        begin, end = max(begin, 0), min(end, config.d_kv - 1)
        kept = 1 - (np.arange(half) - begin) / (end - begin if end != begin else 0.001)
    kept = np.clip(kept, 0, 1)
    return (kept * plain + (1 - kept) * slow).astype(np.float32)


def attention_scale(factor: float, mscale: float | None = None, all_dim: float | None = None) -> float:
    """YaRN's scale of sines and cosines, if config.json does not give it."""

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return grown(mscale) / grown(all_dim) if mscale and all_dim else grown(1.0)
