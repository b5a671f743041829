"""Building blocks shared by the models: projections, norms, attention, relative positions."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from speccascade_jax.core.protocols import AnyArray
from speccascade_jax.models.adapters import AdaptedKernel
from speccascade_jax.models.cache import lengthened
from speccascade_jax.models.quantization import PackedKernel, packed_matmul

Array = jax.Array
SHARED = "tensor"  # the mesh axis whose devices share each model's parameters: parallel.TENSOR_AXIS
Dropout = Callable[[Array], Array]
AfterLayer = Callable[[Any, Array, Array], Array]
"""(index of a layer, its input [B, T, D], its output) -> the next layer's input. The index is traced if
layers are stacked."""


def last_written(number: Any, before: Array, after: Array) -> Array:
    """Passes each layer's output to the next."""
    return after


@jax.custom_vjp
def _mixed_matmul(x: Array, w: Array) -> Array:
    """x @ w with bfloat16 operands and float32 accumulation, differentiable in float32.

    It has its own derivative, because autodiff would make the backward products mixed bfloat16 x float32,
    which no backend runs on its matrix units.
    """
    return jnp.matmul(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def _mixed_matmul_fwd(x, w):
    return _mixed_matmul(x, w), (x, w)


def _weight_gradient(x, grad):
    return lax.dot_general(
        x.astype(jnp.bfloat16),
        grad.astype(jnp.bfloat16),
        (((0,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def _weight_gradient_cpu(x, grad):
    # x^T is laid out in memory first (the flat barrier keeps XLA from undoing it): a product that
    # contracts both leading axes runs at a third of the rate. The barrier around the result keeps XLA from
    # transposing it within the product (for an embedding's gradient), which no CPU without AMX can run.
    columns = x.astype(jnp.bfloat16).T
    columns = lax.optimization_barrier(columns.reshape(-1)).reshape(columns.shape)
    return lax.optimization_barrier(_mixed_matmul(columns, grad))


def _mixed_matmul_bwd(residuals, grad):
    x, w = residuals
    dx = lax.dot_general(
        grad.astype(jnp.bfloat16),
        w.astype(jnp.bfloat16),
        (((grad.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    dw = lax.platform_dependent(
        x.reshape(-1, x.shape[-1]),
        grad.reshape(-1, grad.shape[-1]),
        cpu=_weight_gradient_cpu,
        default=_weight_gradient,
    )
    return dx.astype(x.dtype), dw.astype(w.dtype)


_mixed_matmul.defvjp(_mixed_matmul_fwd, _mixed_matmul_bwd)


def of_rows(product: Callable[[Array], Array], x: Array) -> Array:
    """product(x) for x [..., in]. A single row is doubled, because XLA's CPU backend would convert the whole
    matrix to float32 for it."""
    if math.prod(x.shape[:-1]) > 1:
        return product(x)
    return product(jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0))))[:1].reshape(*x.shape[:-1], -1)


def project(x: Array, kernel: Array | PackedKernel | AdaptedKernel, dtype: Any) -> Array:
    """x [..., in] @ kernel [in, out] -> float32 [..., out], in `dtype` unless the kernel is packed."""
    if isinstance(kernel, AdaptedKernel):
        low = project(project(x, kernel.a, dtype), kernel.b, dtype)
        return project(x, kernel.base, dtype) + kernel.scale * low
    if isinstance(kernel, PackedKernel):
        return of_rows(lambda x: packed_matmul(x, kernel), x)
    if dtype == jnp.bfloat16:
        return of_rows(lambda x: _mixed_matmul(x, kernel), x)
    return x.astype(jnp.float32) @ kernel.astype(jnp.float32)


class Linear(nnx.Module):
    """x [..., in] -> float32 [..., out]."""

    def __init__(self, in_features: int, out_features: int, *, std: float, dtype: Any, rngs: nnx.Rngs):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (in_features, out_features)))
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Array) -> Array:
        return project(x, self.kernel.get_value(), self.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale (Zhang & Sennrich 2019), no mean and no bias."""

    def __init__(self, features: int, epsilon: float = 1e-6):
        self.scale = nnx.Param(jnp.ones((features,)))
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        x = x.astype(jnp.float32)
        norm = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        return x * norm * self.scale[...].astype(jnp.float32)


def settled(x: Array) -> Array:
    """x unchanged, behind a barrier. Without it, XLA for TPUs would change the layout of a product's weights
    in every call, to suit the heads that are cut out of the product."""
    return lax.optimization_barrier(x)


def by_rows(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Splits the rows of arrays [B, ...] between the devices that share the parameters, or replicates them if
    their number does not divide the rows. See sharers()."""
    devices = sharers()
    cut = P(SHARED) if devices and all(not x.shape[0] % devices for x in arrays) else P()
    return tuple(lax.with_sharding_constraint(x, cut) for x in arrays) if devices else arrays


def whole(x: Array) -> Array:
    """Replicates an array on all devices that share the parameters."""
    return lax.with_sharding_constraint(x, P()) if sharers() else x


def sharers() -> int:
    """The number of devices that share each model's parameters; 0 if no mesh is set while this is traced
    (scheduling.programs sets it with jax.set_mesh)."""
    return jax.sharding.get_abstract_mesh().shape.get(SHARED, 0)


def attend(query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """softmax(query keys^T + bias) values, without T5's missing 1/sqrt(K).

    query [B, H, T, K], keys and values [B, H, L, K] (or as in a single row's cache), bias broadcastable to
    [B, H, T, L]; returns [B, H, T, K] in float32.
    """
    scores = with_kept("...tk,...lk->...tl", query, keys.astype(query.dtype))
    weights = jax.nn.softmax(scores + bias, axis=-1)
    return with_kept("...tl,...lk->...tk", weights, values.astype(weights.dtype))


def attend_in_turn(query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """attend() for each of the T tokens separately."""
    bias = jnp.broadcast_to(bias, (*bias.shape[:2], query.shape[2], bias.shape[3]))
    return jnp.concatenate(
        [attend(query[:, :, n : n + 1], keys, values, bias[:, :, n : n + 1]) for n in range(query.shape[2])],
        axis=2,
    )


def with_kept(subscripts: str, x: Array, kept: Array) -> Array:
    """The float32 einsum of x [B, H, T, ...] and a cache's buffer [B, H, L, K], or [H, L, K] for a single
    row."""
    product = jnp.einsum(
        subscripts,
        x.reshape(*kept.shape[:-2], *x.shape[2:]).astype(kept.dtype),
        kept,
        preferred_element_type=jnp.float32,
    )
    return product.reshape(*x.shape[:2], *product.shape[-2:])


def relative_buckets(
    distance: np.ndarray, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
    """T5's bucket of each `distance` = key position - query position (any integer shape).

    Half of the buckets are exact offsets, the rest grow logarithmically up to `max_distance`;
    bidirectional spends half of all buckets on keys to the right of the query.
    """
    offset = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = (distance > 0) * num_buckets
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = num_buckets // 2
    scale = np.log(np.maximum(distance, 1).astype(np.float32) / exact) / np.log(max_distance / exact)
    far = np.minimum(exact + (scale * (num_buckets - exact)).astype(np.int32), num_buckets - 1)
    return (offset + np.where(distance < exact, distance, far)).astype(np.int32)


class Branches(NamedTuple):
    """A tree of texts that continue the tokens in a cache; node n is the n-th token to read."""

    depth: Int[AnyArray, " M"]  # 1 for the first token after the cache
    within: Int[AnyArray, "M M"]  # steps back to the second node, an ancestor or itself; else -1


def steps_back(length: Array, count: int, size: int, branches: Branches | None = None) -> Array:
    """[B, count, size]: the distance of each key in a cache of `size` entries from each of `count` tokens
    written at `length` [B], in sequence or as branches; negative for keys that are not visible."""
    key = jnp.arange(size)
    if branches is None:
        return (length[:, None] + jnp.arange(count))[:, :, None] - key
    before = (length[:, None] + branches.depth - 1)[:, :, None] - key
    place = key - length[:, None]
    within = jnp.moveaxis(branches.within[:, jnp.clip(place, 0, count - 1)], 0, 1)
    branched = jnp.where((place < count)[:, None], within, -1)
    return jnp.where((place < 0)[:, None], before, branched)


def read_branches(network: Any, tokens: Int[AnyArray, " M"], cache: Any, branches: Branches) -> Array:
    """A network's logits [B, M, V] after each node of a tree of texts; the cache is not changed."""
    rows, count = cache.length.shape[0], len(tokens)
    x, _ = network.advance(
        jnp.broadcast_to(tokens, (rows, count)), lengthened(cache, count), branches=branches
    )
    return network.logits(x)


def shift_right(tokens: AnyArray, first: AnyArray) -> Array:
    """`first` [B], followed by all of `tokens` [B, T] except the last."""
    return jnp.concatenate([first[:, None], tokens[:, :-1]], axis=1)


def make_dropout(key: Array | None, rate: float) -> Dropout:
    """A dropout function that draws a fresh mask at each call; identity without a key.

    Masks are shared along the sequence axis, as in T5X, which works as well and needs far fewer random bits.
    """
    if key is None or rate == 0.0:
        return lambda x: x
    keys: Iterator[Array] = (jax.random.fold_in(key, n) for n in range(1_000_000))

    def dropout(x: Array) -> Array:
        keep = jax.random.bernoulli(next(keys), 1.0 - rate, (*x.shape[:-2], 1, x.shape[-1]))
        return jnp.where(keep, x / (1.0 - rate), 0.0)

    return dropout
