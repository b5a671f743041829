"""Meshes of devices, of one or several processes, over which batches and possibly parameters are split."""

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speccascade_jax.core.errors import FieldError

AXIS = "data"
TENSOR_AXIS = "tensor"
CUT_AXIS = {
    "query": 1,
    "key": 1,
    "value": 1,
    "out": 0,
    "gate": 1,
    "up": 1,
    "down": 0,
    "embedding": 0,
    "head": 1,
}
"""The mesh axis of tensor parallelism, which splits heads, hidden units and the vocabulary."""
STACKED = "stack"  # in the path of a parameter that stacks all layers in one array


def make_mesh() -> Mesh:
    """All devices of all processes, along one axis."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def local_mesh() -> Mesh | None:
    """This process's devices along one axis; None if it has only one."""
    if jax.local_device_count() == 1:
        return None
    return jax.make_mesh(
        (jax.local_device_count(),), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.local_devices()
    )


def own_share(count: int) -> tuple[int, int]:
    """The range [first, last) of `count` rows that belong to this process."""
    begin, end = (count * n // jax.process_count() for n in (jax.process_index(), jax.process_index() + 1))
    return begin, end


def gather_text(text: str) -> list[str]:
    """Returns every process's `text`, in the order of their numbers, in all processes."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(data)))
    rows = multihost_utils.process_allgather(np.pad(data, (0, int(sizes.max()) - len(data))))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def parameter_sharding(mesh: Mesh, shape: tuple[int, ...], split: bool) -> NamedSharding:
    """The sharding of an array of parameters or optimizer state: replicated on every device, or (`split`,
    FSDP: Zhao et al. 2023) split along its longest axis that the devices divide. Vectors are replicated.
    """
    devices = math.prod(mesh.shape.values())
    axes = [n for n, size in enumerate(shape) if size % devices == 0]
    if not split or len(shape) < 2 or not axes:
        return NamedSharding(mesh, P())
    longest = max(axes, key=lambda n: shape[n])
    return NamedSharding(mesh, P(*(AXIS if n == longest else None for n in range(len(shape)))))


def decoding_mesh(tensor_parallel: int, batched: bool = True) -> Mesh | None:
    """The devices of all processes in groups of `tensor_parallel`. Each group shares one copy of the models
    and has its own rows. In a single process, returns None if one group is enough (not `batched`) or there is
    only one.

    Raises FieldError if the devices cannot be divided into such groups.
    """
    count = jax.device_count()
    if jax.process_count() == 1:
        if tensor_parallel == 1:
            return local_mesh() if batched else None
        groups = count // tensor_parallel if batched else 1
        if groups <= 1:
            return None
    else:
        groups = count // tensor_parallel
        if groups * tensor_parallel != count:
            raise FieldError(
                "tensor_parallel",
                tensor_parallel,
                "give a divisor.",
                f"tensor_parallel is {tensor_parallel}, which does not divide the {count} devices of all "
                "processes",
            )
    return jax.make_mesh(
        (groups, tensor_parallel),
        (AXIS, TENSOR_AXIS),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: groups * tensor_parallel],
    )


def tensor_mesh(devices: int, among: Sequence[Any] | None = None) -> Mesh:
    """The first `devices` devices, among the given or the local ones, to share each model's parameters.
    Raises FieldError if there are fewer."""
    if among is not None:
        return Mesh(np.array(among[:devices]), (TENSOR_AXIS,), axis_types=(AxisType.Auto,))
    if not 1 <= devices <= jax.device_count():
        raise FieldError(
            "tensor_parallel",
            devices,
            f"it must be in [1, {jax.device_count()}], the number of devices.",
        )
    return jax.make_mesh(
        (devices,), (TENSOR_AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


def tensor_sharding(mesh: Mesh, config: Any, path: tuple[Any, ...], shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of a parameter under tensor parallelism (Shoeybi et al. 2019, Megatron-LM).

    Projections into heads and hidden units are split by columns, those out of them by rows, so that a layer
    exchanges two sums. Heads are never split: if the devices do not divide their number, as for keys and
    values of a grouped-query model, every device holds all of them, as it does small parameters.
    """
    if STACKED in path:  # the layers' axis comes first
        inner = tensor_sharding(mesh, config, tuple(x for x in path if x != STACKED), shape[1:])
        return NamedSharding(mesh, P(None, *inner.spec))
    devices, config = mesh.shape[TENSOR_AXIS], getattr(config, str(path[0]), config)  # of a network's part
    name = path[-2] if path[-1] == "kernel" else path[-1]
    if name not in CUT_AXIS:
        return NamedSharding(mesh, P())
    count = getattr(config, "num_heads", devices)  # exits have no heads
    heads = {"query": count, "out": count}
    kv_heads = getattr(config, "num_kv_heads", count)
    if name in ("key", "value") and hasattr(config, "kv_heads_at"):  # differs between layers
        kv_heads = config.kv_heads_at(path)
    heads |= dict.fromkeys(("key", "value"), kv_heads)
    if heads.get(name, shape[CUT_AXIS[name]]) % devices:
        return NamedSharding(mesh, P())
    return NamedSharding(mesh, P(*(TENSOR_AXIS if n == CUT_AXIS[name] else None for n in range(len(shape)))))


def shared_by(params: Any) -> contextlib.AbstractContextManager[Any]:
    """A context for tracing and compiling models whose parameters (or their shapes) were split by
    tensor_sharding(): in it, models know the mesh and constrain the sharding of activations and caches."""
    for x in jax.tree.leaves(params):
        where = getattr(x, "sharding", None)
        mesh = where.mesh if isinstance(where, NamedSharding) else None
        if isinstance(mesh, Mesh) and TENSOR_AXIS in mesh.axis_names:
            return jax.set_mesh(mesh)
    return contextlib.nullcontext()


def tree_sharding(mesh: Mesh, tree: Any, split: bool) -> Any:
    """parameter_sharding of every array (or shape) in a pytree."""
    return jax.tree.map(lambda x: parameter_sharding(mesh, x.shape, split), tree)


def split_rows(mesh: Mesh, batch: Any) -> Any:
    """Splits host arrays [B, ...], the same in every process, along their rows over the devices."""
    return placed(NamedSharding(mesh, P(AXIS)), batch)


def whole_on(mesh: Mesh | None, tree: Any) -> Any:
    """Replicates arrays, the same in every process, on all devices of the mesh. Arrays already on it are not
    moved. Without a mesh, arrays stay where they are."""
    if mesh is None:
        return tree
    at = NamedSharding(mesh, P())
    return jax.tree.map(
        lambda x: x if getattr(getattr(x, "sharding", None), "mesh", None) == mesh else placed(at, x), tree
    )


def placed(where: NamedSharding, tree: Any) -> Any:
    """Puts arrays, the same in every process, on the devices of a mesh. (jax.device_put() would first compare
    them between the processes.)"""

    def place(x: Any) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(place(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        if where.is_fully_addressable:
            return jax.device_put(x, where)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    return jax.tree.map(place, tree)


def fetched(arrays: Any) -> Any:
    """Fetches arrays to the host, in every process."""
    if jax.process_count() > 1:
        leaves = jax.tree.leaves(arrays)
        spread = [x for x in leaves if not (x.is_fully_addressable or x.is_fully_replicated)]
        arrays = _replicated(spread[0].sharding.mesh)(arrays) if spread else arrays
    return jax.tree.map(np.asarray, arrays)  # jax.device_get() takes longer for small arrays


@lru_cache
def _replicated(mesh: Mesh) -> Callable[[Any], Any]:
    """Copies arrays to all devices of a mesh."""
    return jax.jit(lambda arrays: arrays, out_shardings=NamedSharding(mesh, P()))
