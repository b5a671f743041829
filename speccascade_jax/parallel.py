"""Several devices, several processes: one mesh, batches split over it, parameters whole or split."""

import contextlib
import math
import socket
import time
from collections.abc import Sequence
from typing import Any

import jax
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
"""The axis of a parameter that tensor parallelism cuts: heads, hidden units, the vocabulary."""
STACKED = "stack"  # in the path of a parameter that all layers have in one array


PATIENCE = 60.0
"""Seconds that the processes of a run wait for each other."""


def connect(cluster: str) -> None:
    """Joins the other processes of a run: `auto` where the launcher says who they are (TPU pods,
    Slurm, Open MPI), else HOST:PORT,PROCESSES,NUMBER. Before anything else touches a device.

    Raises FieldError for anything else, and ValueError where the processes do not find each other.
    """
    if cluster == "auto":
        try:
            jax.distributed.initialize()
        except (ValueError, RuntimeError) as error:
            raise FieldError(
                "cluster",
                cluster,
                "start it with one, or write HOST:PORT,PROCESSES,NUMBER.",
                "cluster is auto, but no launcher (a TPU pod, Slurm, Open MPI) says who the other processes "
                f"are ({str(error).rstrip('.')})",
            ) from None
        return
    wrong = FieldError(
        "cluster",
        cluster,
        "write auto, or HOST:PORT,PROCESSES,NUMBER: the first process's address, how many there are, and "
        "which this is, from 0.",
    )
    try:
        address, *counts = cluster.split(",")
        host, _, port = address.rpartition(":")
        place, processes, number = (int(n) for n in (port, *counts))
    except ValueError:
        raise wrong from None
    if not (host and 0 < place < 2**16 and 0 <= number < processes):
        raise wrong
    try:
        socket.getaddrinfo(host.strip("[]"), place)
    except (OSError, UnicodeError) as error:
        raise FieldError(
            "cluster",
            cluster,
            "name another.",
            f"cluster is {cluster!r}, but no host {host!r} is known here ({error})",
        ) from None
    if number:
        _join(host.strip("[]"), place, processes, number)
    else:
        _gather(place, processes)
    jax.distributed.initialize(address, processes, number)


# JAX kills the process, with a stack trace, where another one does not come or the port is taken. So the
# processes meet at that port before.


def _gather(port: int, processes: int) -> None:
    """Waits for all other processes, and tells them. Raises ValueError where one does not come."""
    deadline, came = time.monotonic() + PATIENCE, dict[int, socket.socket]()
    both = socket.has_dualstack_ipv6()
    try:
        server = socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
        )
    except OSError as error:
        raise ValueError(
            f"the port {port} cannot be used here ({error.strerror}): choose another in cluster."
        ) from None
    try:
        while len(came) < processes - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            caller, _ = server.accept()
            caller.settimeout(5)
            with contextlib.suppress(ValueError, OSError):
                said, number = map(int, caller.makefile().readline().split())
                if said == processes and 0 < number < processes and number not in came:
                    came[number] = caller
                    continue
            caller.close()
        for caller in came.values():
            caller.sendall(b"go\n")
    except TimeoutError:
        raise ValueError(
            f"{len(came)} of the {processes - 1} other processes came to port {port} within "
            f"{PATIENCE:.0f} seconds: start them at the same time, with the same cluster but "
            "for their numbers."
        ) from None
    finally:
        for connection in (server, *came.values()):
            connection.close()


def _join(host: str, port: int, processes: int, number: int) -> None:
    """Waits until the first process has met all. Raises ValueError where it does not answer so."""
    deadline, answer = time.monotonic() + PATIENCE, ""
    while not answer and time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=5) as first:
                first.sendall(f"{processes} {number}\n".encode())
                first.settimeout(max(deadline - time.monotonic(), 0.001))
                answer = first.makefile(errors="replace").readline() or "nothing"
        except OSError:
            time.sleep(0.1)
    if answer != "go\n":
        raise ValueError(
            f"the first process, at {host}:{port}, did not answer within {PATIENCE:.0f} seconds "
            f"or wants no process {number} of {processes}: start all at the same time, with the "
            "same cluster but for their numbers, which differ."
        )


def make_mesh() -> Mesh:
    """All devices of all processes, along one axis."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def local_mesh() -> Mesh | None:
    """This process's own devices along one axis; None where it has one."""
    if jax.local_device_count() == 1:
        return None
    return jax.make_mesh(
        (jax.local_device_count(),), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.local_devices()
    )


def own_share(count: int) -> tuple[int, int]:
    """The first and the last (not included) of `count` rows that are this process's."""
    begin, end = (count * n // jax.process_count() for n in (jax.process_index(), jax.process_index() + 1))
    return begin, end


def gather_text(text: str) -> list[str]:
    """Every process's `text`, in the order of their numbers, in all of them."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(data)))
    rows = multihost_utils.process_allgather(np.pad(data, (0, int(sizes.max()) - len(data))))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def parameter_sharding(mesh: Mesh, shape: tuple[int, ...], split: bool) -> NamedSharding:
    """Where an array of parameters or optimizer state lives: whole on every device, or (`split`,
    FSDP: Zhao et al. 2023) cut along its longest axis that the devices divide. Vectors stay whole.
    """
    devices = math.prod(mesh.shape.values())
    axes = [n for n, size in enumerate(shape) if size % devices == 0]
    if not split or len(shape) < 2 or not axes:
        return NamedSharding(mesh, P())
    longest = max(axes, key=lambda n: shape[n])
    return NamedSharding(mesh, P(*(AXIS if n == longest else None for n in range(len(shape)))))


def tensor_mesh(devices: int, among: Sequence[Any] | None = None) -> Mesh:
    """The first so many devices, of `among` or of those here, to share each model's parameters. Raises
    FieldError if there are fewer."""
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
    """Tensor parallelism (Shoeybi et al. 2019, Megatron-LM): which part of a parameter each device holds.

    Projections into heads and hidden units are cut by columns, those out of them by rows, so that a
    layer exchanges two sums. Heads are never cut: those that the devices do not divide (the keys'
    and values' of a grouped-query model, say) every device holds whole, as it does what is small.
    """
    if STACKED in path:  # an axis of layers comes first
        inner = tensor_sharding(mesh, config, tuple(x for x in path if x != STACKED), shape[1:])
        return NamedSharding(mesh, P(None, *inner.spec))
    devices, config = mesh.shape[TENSOR_AXIS], getattr(config, str(path[0]), config)  # a network's part's
    name = path[-2] if path[-1] == "kernel" else path[-1]
    if name not in CUT_AXIS:
        return NamedSharding(mesh, P())
    count = getattr(config, "num_heads", devices)  # exits have none
    heads = {"query": count, "out": count}
    kv_heads = getattr(config, "num_kv_heads", count)
    if name in ("key", "value") and hasattr(config, "kv_heads_at"):  # not the same in all layers
        kv_heads = config.kv_heads_at(path)
    heads |= dict.fromkeys(("key", "value"), kv_heads)
    if heads.get(name, shape[CUT_AXIS[name]]) % devices:
        return NamedSharding(mesh, P())
    return NamedSharding(mesh, P(*(TENSOR_AXIS if n == CUT_AXIS[name] else None for n in range(len(shape)))))


def shared_by(params: Any) -> contextlib.AbstractContextManager[Any]:
    """What to trace and compile models in whose parameters (or shapes of them) tensor_sharding() has cut:
    there they know the mesh, and say how their activations and caches are divided."""
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
    """Host arrays [B, ...], the same in every process, as device arrays split along their rows."""
    sharding = NamedSharding(mesh, P(AXIS))

    def place(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(place, batch)
