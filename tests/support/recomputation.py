"""Evaluates a program as if its compiler computed arrays anew for each of their uses, rounded differently."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

ROUNDED = {"exp", "div", "reduce_sum", "cumsum"}
"""Operations whose result depends on how they are fused and in which order they add."""
STORED = {"while", "scan"}
"""Operations whose result is computed once, like that of an optimization barrier, even within a branch."""


def primitives_of(equation: Any) -> set[str]:
    """The names of an equation's operation and of those in the programs that it calls."""
    names, inner = {equation.primitive.name}, jax.tree.leaves(equation.params, is_leaf=is_program)
    for program in filter(is_program, inner):
        for nested in getattr(program, "jaxpr", program).eqns:
            names |= primitives_of(nested)
    return names


def is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def recomputed(function: Callable[..., jax.Array], *arguments: Any, seed: int) -> jax.Array:
    """function(*arguments), in which each read of a rounded float or of its bits is up by a unit in the last
    place, down by one, or as it was."""
    program, rng = jax.make_jaxpr(function)(*arguments), np.random.default_rng(seed)
    held: dict[Any, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    held |= zip(program.jaxpr.invars, jax.tree.leaves(arguments), strict=True)
    rounded = set()

    def read(variable: Any) -> Any:
        value = held[variable]
        if variable not in rounded or value.dtype not in (np.float32, np.uint32):
            return value
        moved = value.view(np.uint32) + rng.choice(np.array([-1, 0, 1]), size=value.shape).astype(np.uint32)
        ordinary = np.isfinite(value) & (value != 0)
        return np.where(ordinary, moved.view(value.dtype), value)

    for equation in program.jaxpr.eqns:
        variables = list(dict.fromkeys(v for v in equation.invars if not hasattr(v, "val")))
        alone = program.jaxpr.replace(
            eqns=[equation], constvars=[], invars=variables, outvars=equation.outvars
        )
        outputs = jax.core.eval_jaxpr(alone, [], *map(read, variables))
        held |= zip(equation.outvars, map(np.asarray, outputs), strict=True)
        names = primitives_of(equation)
        rounds = bool(names & ROUNDED) or not rounded.isdisjoint(variables)
        if rounds and equation.primitive.name not in STORED and "optimization_barrier" not in names:
            rounded |= set(equation.outvars)
    return read(program.jaxpr.outvars[0])
