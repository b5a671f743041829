"""The share of the verifier's vocabulary that a drafter with another vocabulary covers."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.protocols import Array
from speccascade_jax.inference.text import Cascade, Output
from speccascade_jax.tokenizers.tokenizer import pad
from speccascade_jax.vocabularies.translated import NONE, Translated


def coverage(cascade: Cascade, outputs: Sequence[Output], limit: int = 32) -> dict[str, tuple[float, float]]:
    """For each drafter with another vocabulary, the share of the verifier's tokens that both have, and their
    share of the verifier's probability at temperature 1: the mean of sum p(t) over the positions of the first
    `limit` outputs (nan if all are empty)."""
    shared = {
        str(n): np.asarray(weights.tables.place)[: cascade.tokenizer.size] < NONE
        for n, (model, weights) in enumerate(zip(cascade.models, cascade.params, strict=True))
        if isinstance(model, Translated)
    }
    kept = [output for output in outputs if output.tokens][:limit]
    if not shared or not kept:
        return {name: (float(np.mean(mask)), float("nan")) for name, mask in shared.items()}
    rows, _ = cascade.encode([output.source for output in kept], truncate=True)
    width, size = cascade.bucket(max(map(len, rows))), max(len(output.tokens) for output in kept)
    masks = jnp.stack([jnp.asarray(mask, jnp.float32) for mask in shared.values()])

    def masses(inputs: Array, length: Array, tokens: Array, count: Array) -> Array:
        prefix, cache = cascade.verifier.prefill(cascade.params[-1], inputs, length, width + size + 1)
        last = jnp.take_along_axis(prefix.tokens, prefix.length[:, None] - 1, axis=1)
        read = jnp.concatenate([last, tokens[:, :-1]], axis=1)
        logits, _ = cascade.verifier.extend(cascade.params[-1], read, cache)
        law = jax.nn.softmax(logits, axis=-1)[..., : masks.shape[1]]
        inside = jnp.arange(size) < count[:, None]
        return jnp.sum((law @ masks.T) * inside[..., None], axis=(0, 1))

    program, total = jax.jit(masses), np.zeros(len(shared))
    for row, output in zip(rows, kept, strict=True):
        inputs, length = pad([row], width, cascade.tokenizer.pad_id)
        tokens, count = pad([output.tokens], size, cascade.tokenizer.pad_id)
        total += np.asarray(program(*map(jnp.asarray, (inputs, length, tokens, count))))
    positions = sum(len(output.tokens) for output in kept)
    return {
        name: (float(np.mean(mask)), float(mass / positions))
        for (name, mask), mass in zip(shared.items(), total, strict=True)
    }


def shown(cascade: Cascade, outputs: Sequence[Output]) -> dict[str, str]:
    """coverage() as text for summaries; empty if there is only one vocabulary."""
    name = cascade.strategy.name
    return {
        f"vocabulary of model {model}": f"{name}; shared: {tokens:.1%} of the tokens, {mass:.1%} of the "
        "verifier's probability"
        for model, (tokens, mass) in coverage(cascade, outputs).items()
    }
