"""Shapes and dtypes of signatures, checked by jaxtyping with beartype: an int is taken where a float is asked
for."""

import inspect

import jaxtyping
from beartype import BeartypeConf, beartype

typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_signatures(packages):
    """Has the functions of these packages checked, which must not be imported yet. Nested functions are
    checked only if they state a shape: jaxtyping decorates them anew in every call of the outer one."""
    every = jaxtyping.jaxtyped

    def jaxtyped(**options):
        decorate = every(**options)
        return lambda function: function if shapeless_and_nested(function) else decorate(function)

    jaxtyping.jaxtyped = jaxtyped
    jaxtyping.install_import_hook(packages, f"{__name__}.typechecker")


def shapeless_and_nested(function):
    annotations = inspect.get_annotations(function).values()
    return "<locals>" in function.__qualname__ and "jaxtyping." not in repr(list(annotations))
