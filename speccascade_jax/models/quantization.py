"""Kernels in the form that is fastest for decoding: int8 or, on CPUs, with the weights of each output
adjacent."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from speccascade_jax.core.protocols import AnyArray

Array = jax.Array
TRANSPOSED_FROM = 1024
"""With this many inputs or more, CPUs multiply [out, in] faster than [in, out]: 1.6 times in bfloat16."""
SMALLEST = 1e-30  # replaces a maximum of zero


def wants_packing(dtype: Any) -> bool:
    """Whether kernels in `dtype` are packed to decode: int8 everywhere, bfloat16 on CPUs."""
    return jnp.dtype(dtype) == jnp.int8 or (
        jnp.dtype(dtype) == jnp.bfloat16 and jax.default_backend() == "cpu"
    )


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["transposed"])
@dataclasses.dataclass(frozen=True)
class PackedKernel:
    """A matrix [in, out] for inference only."""

    values: Any  # [in, out], or [out, in] if `transposed`; bfloat16 or int8
    scale: Any  # float32 [out], the factor of int8 values; None for bfloat16
    transposed: bool


def turned(inputs: int) -> bool:
    """Whether a kernel with this many inputs is packed as [out, in]."""
    return inputs >= TRANSPOSED_FROM


def pack(kernel: np.ndarray, dtype: Any, transposed: bool | None = None) -> PackedKernel:
    """`kernel` [in, out] in `dtype`, int8 or bfloat16, on the host.

    int8 is symmetric, with a scale for each output: column v becomes round(127 v / max|v|).
    """
    transposed = turned(kernel.shape[0]) if transposed is None else transposed
    scale = None
    if jnp.dtype(dtype) == jnp.int8:
        scale = np.maximum(np.max(np.abs(kernel), axis=0).astype(np.float32), SMALLEST) / 127
        kernel = np.rint(kernel / scale)
    values = kernel.T if transposed else kernel
    return PackedKernel(np.ascontiguousarray(values.astype(dtype)), scale, transposed)


def packed_matmul(x: Array, kernel: PackedKernel) -> Array:
    """x [..., in] @ kernel -> float32 [..., out].

    CPUs multiply int8: each row of x is rounded to multiples of 1/127 of its largest value (dynamic
    quantization, as in CTranslate2), and sums are exact integers. Accelerators only store int8: x stays
    bfloat16, and XLA widens the weights inside the product.
    """
    shape = *x.shape[:-1], -1
    x = x.reshape(-1, x.shape[-1])  # with more axes, XLA copies a transposed kernel inside a loop
    contract = (((1,), (int(kernel.transposed),)), ((), ()))

    def product(a: Any, b: Any, sums: Any) -> Array:
        return lax.dot_general(a, b, contract, preferred_element_type=sums)

    def rounded(x: AnyArray, values: AnyArray) -> Array:
        x = x.astype(jnp.float32)
        step = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), SMALLEST) / 127
        return product(jnp.rint(x / step).astype(jnp.int8), values, jnp.int32).astype(jnp.float32) * step

    def widened(x: AnyArray, values: AnyArray) -> Array:
        return product(x.astype(jnp.bfloat16), values.astype(jnp.bfloat16), jnp.float32)

    if kernel.scale is None:
        return product(x.astype(kernel.values.dtype), kernel.values, jnp.float32).reshape(shape)
    unscaled = lax.platform_dependent(x, kernel.values, cpu=rounded, default=widened)
    return (unscaled * kernel.scale).reshape(shape)


def tied_kernel(table: Array | PackedKernel) -> Array | PackedKernel:
    """The logits' kernel [D, V] from an embedding [V, D]."""
    return table if isinstance(table, PackedKernel) else table.T


def columns_of(kernel: Array | PackedKernel, keep: np.ndarray) -> Array | PackedKernel:
    """The columns `keep` [I] of a kernel [in, out], in that order."""
    if not isinstance(kernel, PackedKernel):
        return jnp.take(kernel, keep, axis=1)
    values = jnp.take(kernel.values, keep, axis=0 if kernel.transposed else 1)
    scale = None if kernel.scale is None else jnp.take(kernel.scale, keep)
    return dataclasses.replace(kernel, values=values, scale=scale)


@jax.jit
def taken(table: Array, index: AnyArray) -> Array:
    """The rows `index` of [V, D]. Some CPUs read bfloat16 rows as float32, and XLA would then widen the whole
    table before a loop that does not change it. The barrier keeps the widening inside the loop."""
    table, index = lax.optimization_barrier((table, index))
    return jnp.take(table, index, axis=0)


def table_rows(table: Array | PackedKernel, index: AnyArray) -> Array:
    """The float32 rows `index` [...] of an embedding [V, D], which may be packed as the logits' kernel."""
    if not isinstance(table, PackedKernel):
        return taken(table, index).astype(jnp.float32)
    flat = jnp.pad(index.reshape(-1), (0, 1))  # TPUs would copy the whole table to take one int8 row
    rows = taken(table.values, flat).astype(jnp.float32)
    rows = rows if table.scale is None else rows * jnp.take(table.scale, flat)[:, None]
    return rows[:-1].reshape(*index.shape, -1)
