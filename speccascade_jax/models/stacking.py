"""Layers of one shape, either separate or stacked: their parameters are then in one array, over which a
compiled loop runs.

On accelerators, compiling one layer takes a fraction of the time of compiling all. CPUs would copy each
layer's weights out of the stack in every call, so layers are separate there.

A family supports stacking with a field `stacked` of its model, layers_of() where its network creates layers,
each_layer() where it iterates over them, and write_layer(), nth() and insert_layers() for their caches.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Array = jax.Array
STACK = "stack"  # takes the place of a layer's index in a path


class Stacked(nnx.Module):
    """`layers` of one shape as one module, whose parameters have a leading axis of layers."""

    def __init__(self, layers: Sequence[nnx.Module]):
        graphdef, first = nnx.split(layers[0])
        states = [first, *(nnx.state(layer) for layer in layers[1:])]
        self.stack = nnx.merge(graphdef, jax.tree.map(lambda *arrays: jnp.stack(arrays), *states))
        self.count = len(layers)

    def parts(self) -> tuple[Callable[[Any], Any], nnx.State]:
        """(function from a layer's parameters to the layer, parameters of all layers)."""
        graphdef, state = nnx.split(self.stack)
        return lambda params: nnx.merge(graphdef, params), state


def layers_of(layers: Sequence[nnx.Module], stacked: bool) -> Any:
    """The layers that each_layer() iterates over."""
    return Stacked(layers) if stacked and layers else nnx.List(layers)


def each_layer(
    layers: Any, call: Callable[[Any, Any, Any], Any], carry: Any, depth: int | None = None
) -> Any:
    """carry = call(index, layer, carry) for the first `depth` layers in order, by default for all. The index
    of a stacked layer is traced."""
    if not isinstance(layers, Stacked):
        for number, layer in enumerate(layers[:depth]):
            carry = call(number, layer, carry)
        return carry
    layer_of, state = layers.parts()

    def call_nth(number: Array, carry: Any) -> Any:
        return call(number, layer_of(nth(state, number)), carry)

    return lax.fori_loop(0, layers.count if depth is None else depth, call_nth, carry)


def of_each_layer(layers: Any, call: Callable[[Any], Any]) -> Any:
    """The arrays call(layer) of every layer, in a tuple or stacked like the layers."""
    if not isinstance(layers, Stacked):
        return tuple(zip(*map(call, layers), strict=True))
    layer_of, state = layers.parts()
    return lax.map(lambda params: call(layer_of(params)), state)


def repeated(array: Array, layers: Any, count: int | None = None) -> Any:
    """The array repeated for each layer, or `count` times, in a tuple or stacked like the layers."""
    if isinstance(layers, Stacked):
        return jnp.broadcast_to(array, (layers.count if count is None else count, *array.shape))
    return (array,) * (len(layers) if count is None else count)


def nth(values: Any, number: Any) -> Any:
    """The entry of layer `number`; values is a tuple, or arrays with an axis of layers."""
    if isinstance(values, tuple):
        return values[number]
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), values)


def shared_or_nth(values: Sequence[Array], number: Any) -> Array:
    """The value that all layers share, or the `number`-th of a value for each."""
    if len(values) == 1:
        return values[0]
    return values[number] if isinstance(number, int) else nth(jnp.stack(values), number)


def blank_states(before: tuple[int, ...], x: Array) -> Array | None:
    """A buffer [N + 1, B, T, D] for the states before N layers, shaped like x [B, T, D]. The last entry is
    scratch."""
    return jnp.zeros((len(before) + 1, *x.shape), x.dtype) if before else None


def with_state(states: Array | None, before: tuple[int, ...], number: Any, x: Array) -> Any:
    """blank_states() with the state x [B, T, D] before the `number`-th layer, if `before` names it."""
    if states is None or (isinstance(number, int) and number not in before):
        return states
    if isinstance(number, int):
        return states.at[before.index(number)].set(x)
    named = jnp.array(before) == number
    place = jnp.where(jnp.any(named), jnp.argmax(named), len(before))
    return lax.dynamic_update_index_in_dim(states, x, place, 0)


def wants_stacking() -> bool:
    """Whether layers are stacked to decode on this machine."""
    return jax.default_backend() != "cpu"


def stackable(model: Any) -> Any:
    """The same model with stacked layers, if its family supports that."""
    return dataclasses.replace(model, stacked=True) if hasattr(model, "stacked") else model


def stacked(model: Any, params: nnx.State) -> tuple[Any, nnx.State]:
    """stackable(model), and its parameters.

    One kind of array is stacked at a time and its originals are released. So at most one kind is in memory
    twice, if the caller keeps no reference to `params`.
    """
    if not hasattr(model, "stacked"):
        return model, params
    model = stackable(model)
    shapes, flat = model.abstract_params(), dict(nnx.to_flat_state(params))
    for path, shape in nnx.to_flat_state(shapes):
        if STACK in path and path not in flat:
            at = path.index(STACK)
            arrays = [flat.pop((*path[:at], number, *path[at + 1 :])) for number in range(shape.shape[0])]
            flat[path] = arrays[0].replace(_stack([array.get_value() for array in arrays]))
    nnx.update(shapes, nnx.from_flat_state(flat))
    return model, shapes


def _stack(arrays: list[Any]) -> Any:
    def stack_leaves(*leaves: Array) -> Array:
        where = getattr(leaves[0], "sharding", None)
        if isinstance(where, NamedSharding):
            where = NamedSharding(where.mesh, P(None, *where.spec))
        return jax.jit(lambda *x: jnp.stack(x), out_shardings=where)(*leaves)

    return jax.tree.map(stack_leaves, *arrays)
