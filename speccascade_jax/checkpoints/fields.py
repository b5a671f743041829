"""Checks of a model config's fields, because files and flags may hold anything."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

from speccascade_jax.checkpoints.files import shown
from speccascade_jax.models import Config

LARGEST = 2**31 - 1  # the largest size: int32 indices
MOST_LAYERS = 1000


def check_fields(
    where: Any,
    kind: type[Config],
    values: Mapping[str, Any],
    names: Mapping[str, str] | None = None,
    part: bool = False,
    usual: Config | None = None,
) -> None:
    """Raises ValueError naming the first field of a config (under its name in `names`) with a wrong type or
    value. Fields that `values` lacks have their value in `usual` or their default. A `part` of a network may
    lack an encoder."""
    hints = get_type_hints(kind)
    usual = usual or kind()
    values = {
        field.name: values.get(field.name, getattr(usual, field.name)) for field in dataclasses.fields(kind)
    }
    for field in dataclasses.fields(kind):
        value = values[field.name]
        wanted = needed(field.name, hints[field.name], value, values.get("vocab_size"))
        if part and field.name == "num_encoder_layers" and type(value) is int and value == 0:
            continue
        if wanted is not None:
            spelt = (names or {}).get(field.name, field.name)
            raise ValueError(f"{where}: {spelt} is {shown(value)}, not {wanted}.")


def needed(name: str, kind: Any, value: Any, vocab_size: Any) -> str | None:
    """Describes valid values of the field `name` of type `kind`; None if `value` is valid."""
    parts: tuple[Any, ...] = tuple(
        option for option in (kind, *get_args(kind)) if dataclasses.is_dataclass(option)
    )
    if parts:
        return None if isinstance(value, parts) else "the shape of one model"
    if kind is str:
        return None if isinstance(value, str) else "a text"
    if get_origin(kind) is tuple:
        whole = isinstance(value, tuple) and all(type(item) is int for item in value)
        return None if whole else "a list of whole numbers"
    if kind is bool:
        return None if isinstance(value, bool) else "true or false"
    if type(None) in get_args(kind):
        if value is None:
            return None
        kind = next(option for option in get_args(kind) if option is not type(None))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "dropout_rate":
        return None if number and 0 <= value < 1 else "a number from 0 to below 1"
    if kind is not int:
        return None if number and 0 < value <= LARGEST else "a number above 0"
    lowest, highest = 1, MOST_LAYERS if name.endswith("_layers") else LARGEST
    if name.endswith("_id"):  # vocab_size, the first field, is checked by now
        lowest, highest = 0, vocab_size - 1
    return (
        None
        if isinstance(value, int) and number and lowest <= value <= highest
        else (f"a whole number from {lowest} to {highest}")
    )
