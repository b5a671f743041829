"""What the formats share: host arrays into parameters, one at a time; the libraries' errors in a line."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from speccascade_jax.models import Model

ParameterPath = tuple[Any, ...]
Sharding = Callable[[ParameterPath, tuple[int, ...]], jax.sharding.Sharding]
"""(path of a parameter, its shape) -> where its parts go."""


def reason(error: Exception) -> str:
    """An error's first line, without the spec that TensorStore adds to its own."""
    return str(error).split(" [tensorstore_spec")[0].split("\n")[0]


def place(array: np.ndarray, path: ParameterPath, dtype: Any, sharding: Sharding | None) -> jax.Array:
    """A host array as a device array in `dtype`: each device gets its own part only."""
    array = array.astype(dtype, copy=False)
    if sharding is None:
        return jnp.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding(path, array.shape), lambda part: array[part])


def to_params(model: Model, arrays: Iterable[tuple[ParameterPath, str, np.ndarray]], dtype: Any,
              sharding: Sharding | None) -> nnx.State:
    """The model's parameters from (path, name in the file, array) triples.

    One host array is alive at a time. Raises ValueError where one holds NaN or infinity: no format
    but T5X's compressed arrays has a checksum, and damage mostly shows in the exponents.
    """
    params = model.abstract_params()
    flat = dict(nnx.to_flat_state(params))
    for path, name, array in arrays:
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds values that are not finite: the file is damaged, fetch it again.")
        flat[path] = flat[path].replace(place(array, path, dtype, sharding))
        del array
    nnx.update(params, nnx.from_flat_state(flat))
    return params
