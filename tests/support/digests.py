"""A toy whose every entry in the cache depends on its parameters and on all tokens before it, as keys and
values do."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.protocols import Prefix
from speccascade_jax.models.cache import write

PRIME = 10_007


class Digests(NamedTuple):
    digests: jax.Array  # [B, L]: of all tokens up to each position
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class Digest:
    """Its parameters are logits [N, V], of which a text's digest chooses a row. It computes with whole
    numbers, so what is read in other chunks is the same to the last bit."""

    vocab_size: int

    def prefill(self, params, inputs, input_length, max_length):
        empty = jnp.zeros((inputs.shape[0], max_length), jnp.int32)
        _, cache = self.extend(params, inputs, Digests(empty, jnp.zeros_like(input_length)))
        return Prefix(inputs, input_length), self.roll_back(cache, jnp.maximum(input_length - 1, 0))

    def extend(self, params, tokens, cache):
        last = jnp.take_along_axis(cache.digests, jnp.maximum(cache.length - 1, 0)[:, None], axis=1)[:, 0]
        salt = jnp.int32(1000 * jnp.abs(params[0, 0])) + 1

        def read(before, token):
            digest = (before * 31 + token + salt) % PRIME
            return digest, digest

        _, digests = jax.lax.scan(read, jnp.where(cache.length > 0, last, 0), jnp.asarray(tokens).T)
        written = write(cache.digests, digests.T, cache.length)
        return params[digests.T % len(params)], Digests(written, cache.length + tokens.shape[1])

    def roll_back(self, cache, length):
        return cache._replace(length=jnp.asarray(length))

    def segment(self, cache, row, start, size):
        return jax.lax.dynamic_slice(cache.digests, (row, start), (1, size))[0]

    def with_segment(self, cache, segment, rows, start):
        old = jax.lax.dynamic_slice(cache.digests, (0, start), (len(cache.digests), len(segment)))
        new = jnp.where(rows[:, None], segment, old)
        written = jax.lax.dynamic_update_slice(cache.digests, new, (0, start))
        return Digests(written, jnp.where(rows, start + len(segment), cache.length))


def logits(seed, vocab_size, like=None):
    """Parameters; half `like` others, where these are given."""
    fresh = 2 * np.random.default_rng(seed).normal(size=(211, vocab_size)).astype(np.float32)
    return fresh if like is None else (fresh + 2 * like) / 2
