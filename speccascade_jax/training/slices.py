"""The initial parameters of a drafter that reads its verifier's encoder: a slice of the verifier.

The drafter's residual stream is the verifier's in the directions that the verifier's head weighs most. Its
layers are the verifier's last ones, with the heads and neurons that write most in these directions. SliceGPT
(Ashkboos et al. 2024, arXiv 2401.15024) makes models narrower in a similar way, but takes the directions from
data.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from speccascade_jax.models.shared_encoder import SharedEncoder, SharedEncoderModel
from speccascade_jax.models.t5 import Attention, FeedForward, T5Config

Array = jax.Array


def fits(drafter: T5Config, verifier: T5Config) -> bool:
    """Whether a drafter of this shape can be a slice of the verifier."""
    alike = (
        "vocab_size",
        "d_kv",
        "gated",
        "tied_embeddings",
        "shared_position_bias",
        "relative_buckets",
        "relative_max_distance",
    )
    smaller = "d_model", "num_heads", "d_ff", "num_decoder_layers"
    return all(getattr(drafter, name) == getattr(verifier, name) for name in alike) and all(
        getattr(drafter, name) <= getattr(verifier, name) for name in smaller
    )


def with_slice(model: SharedEncoderModel, params: nnx.State, at: Any = None) -> nnx.State:
    """The parameters with the drafter, and the projections of what it reads, replaced by a slice of the
    verifier, in the shardings `at`. They are unchanged if the drafter's shape does not fit()."""
    if not fits(model.config.drafter, model.config.verifier):
        return params
    return jax.jit(partial(_with_slice, model), out_shardings=at)(params)


def _with_slice(model: SharedEncoderModel, params: nnx.State) -> nnx.State:
    network = model.merged(params)
    with jax.default_matmul_precision("highest"):
        replace_drafter(network)
    return nnx.state(network)


def replace_drafter(network: SharedEncoder) -> None:
    """Makes the drafter of a network a slice of its verifier."""
    drafter, verifier = network.drafter, network.verifier
    scale = column(verifier.decoder_norm.scale)
    head = scale * numbers(verifier.head_kernel())
    kept = leading(head, drafter.config.d_model)
    put(drafter.embedding, numbers(verifier.embedding) @ kept, rescaled=True)
    if drafter.head is not None:
        put(drafter.head.kernel, kept.T @ head)
    if network.states is not None:  # the verifier's states are those after the norm
        put(network.states.kernel, jnp.where(scale == 0, 0, kept / scale))

    layers = list(zip(drafter.decoder, list(verifier.decoder)[-len(drafter.decoder) :], strict=True))
    # One choice for all layers, because they may share their position biases.
    written = jnp.stack([heads_written(full.attention, kept) for _, full in layers])
    heads = largest(written.sum(axis=0), drafter.config.num_heads)
    biases = numbers(verifier.decoder_bias)[..., heads]
    put(drafter.decoder_bias, biases if drafter.config.shared_position_bias else biases[-len(layers) :])
    crossed = [largest(heads_written(full.cross, kept), drafter.config.num_heads) for _, full in layers]
    read = [
        numbers(product.kernel)[:, of_heads(chosen, full.cross)]
        for (_, full), chosen in zip(layers, crossed, strict=True)
        for product in (full.cross.key, full.cross.value)
    ]
    source = leading(jnp.concatenate(read, axis=1), drafter.config.d_model)
    put(network.projection.kernel, source)
    for (layer, full), chosen in zip(layers, crossed, strict=True):
        stream = column(full.attention_norm.scale) * kept
        slice_attention(layer.attention, full.attention, heads, stream, stream, kept)
        slice_attention(layer.cross, full.cross, chosen, column(full.cross_norm.scale) * kept, source, kept)
        slice_mlp(layer.mlp, full.mlp, column(full.mlp_norm.scale) * kept, kept)


def slice_attention(
    small: Attention, full: Attention, heads: Array, asks: Array, answers: Array, kept: Array
) -> None:
    """Makes `small` the chosen heads of `full`, whose queries read the directions `asks` [D, d], whose keys
    and values read `answers`, and whose output writes `kept`."""
    columns = of_heads(heads, full)
    for product, of_full, read in (
        (small.query, full.query, asks),
        (small.key, full.key, answers),
        (small.value, full.value, answers),
    ):
        put(product.kernel, read.T @ numbers(of_full.kernel)[:, columns])
    put(small.out.kernel, numbers(full.out.kernel)[columns] @ kept, rescaled=True)


def slice_mlp(small: FeedForward, full: FeedForward, read: Array, kept: Array) -> None:
    """Makes `small` the neurons of `full` that write most in the directions `kept` [D, d]."""
    products = [(small.gate, full.gate)]
    if small.up is not None and full.up is not None:
        products.append((small.up, full.up))
    written = numbers(full.down.kernel) @ kept
    sizes = jnp.linalg.norm(written, axis=1)
    for _, whole in products:
        sizes = sizes * jnp.linalg.norm(read.T @ numbers(whole.kernel), axis=0)
    neurons = largest(sizes, small.down.kernel.shape[0])
    for product, whole in products:
        put(product.kernel, read.T @ numbers(whole.kernel)[:, neurons])
    put(small.down.kernel, written[neurons], rescaled=True)


def heads_written(attention: Attention, kept: Array) -> Array:
    """[H]: how much each head of an attention writes in the directions `kept` [D, d]."""
    value, out = numbers(attention.value.kernel), numbers(attention.out.kernel) @ kept
    columns = [of_heads([head], attention) for head in range(attention.num_heads)]
    return jnp.stack([jnp.linalg.norm(value[:, chosen] @ out[chosen]) for chosen in columns])


def of_heads(heads: Any, attention: Attention) -> Array:
    """The columns of some heads in an attention's kernels."""
    columns = jnp.arange(attention.out.kernel.shape[0]).reshape(attention.num_heads, -1)
    return columns[jnp.asarray(heads)].ravel()


def leading(matrix: Array, count: int) -> Array:
    """[D, count]: the orthonormal directions that hold most of the columns of `matrix` [D, N]."""
    return jnp.linalg.eigh(matrix @ matrix.T)[1][:, ::-1][:, :count]


def largest(sizes: Array, count: int) -> Array:
    """The indices of the largest sizes, in ascending order."""
    return jnp.sort(jnp.argsort(sizes)[len(sizes) - count :])


def numbers(parameter: Any) -> Array:
    return jnp.asarray(parameter[...], jnp.float32)


def column(scale: nnx.Param) -> Array:
    return numbers(scale)[:, None]


def put(parameter: nnx.Param, values: Array, rescaled: bool = False) -> None:
    """Replaces a parameter; `rescaled` to its previous norm."""
    before = numbers(parameter)
    if rescaled:
        norm = jnp.linalg.norm(values)
        values = values * (jnp.linalg.norm(before) / jnp.where(norm == 0, 1, norm))
    parameter[...] = values.reshape(before.shape)
