"""JSON schemas of a dataclass's fields, and checks of values against a schema."""

import json
import math
import sys
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from speccascade_jax.core.errors import FieldError

Schema = dict[str, Any]
LONGEST_TEXT, MOST_ITEMS = 256, 16  # of a name or stop text, and of a list of them
PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string"}
KINDS = {
    "number": "a number",
    "integer": "a whole number",
    "string": "a text",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
}


def schema_of(annotation: Any, metadata: Mapping[str, Any]) -> Schema:
    """The schema of a field: the part of its type that JSON can express, within the bounds `low` and `high`
    of its metadata, with `low` excluded if `above`. A field that is only a tuple also accepts a single
    item."""
    choices = alternatives(annotation, metadata)
    if get_origin(annotation) is tuple:
        choices = [choices[0]["items"], *choices]
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def alternatives(annotation: Any, metadata: Mapping[str, Any]) -> list[Schema]:
    """A schema for each type of a union, except None and types that JSON cannot express."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [choice for part in get_args(annotation) for choice in alternatives(part, metadata)]
    if get_origin(annotation) is Literal:
        return [{"type": "string", "enum": list(get_args(annotation))}]
    if get_origin(annotation) is tuple:
        items = alternatives(get_args(annotation)[0], metadata)
        return [{"type": "array", "items": items[0], "maxItems": MOST_ITEMS}] if items else []
    if get_origin(annotation) is Mapping:
        values = schema_of(get_args(annotation)[1], metadata)
        return [{"type": "object", "additionalProperties": values, "maxProperties": MOST_ITEMS}]
    if annotation not in PLAIN:
        return []
    schema: Schema = {"type": PLAIN[annotation]}
    if annotation is str:
        return [schema | {"minLength": 1, "maxLength": LONGEST_TEXT}]
    low = "exclusiveMinimum" if metadata.get("above") else "minimum"
    bounds = {low: metadata.get("low"), "maximum": metadata.get("high")}
    return [
        schema | {name: bound for name, bound in bounds.items() if bound is not None and math.isfinite(bound)}
    ]


def check(field: str, value: Any, schema: Schema, place: str = "") -> None:
    """Raises FieldError unless a field's value satisfies its schema. `place`: the value's place in the
    field."""
    place = place or field
    schema = _fitting(field, value, schema, place)
    if "enum" in schema and value not in schema["enum"]:
        known = ", ".join(map(shown, schema["enum"]))
        raise FieldError(field, value, f"known: {known}.", f"{place} is {shown(value)}")
    CHECKS.get(schema["type"], lambda *_: None)(field, value, schema, place)


def _fitting(field: str, value: Any, schema: Schema, place: str) -> Schema:
    """The schema, or the alternative for the value's type."""
    choices = schema.get("anyOf", [schema])
    for choice in choices:
        if is_of(value, choice["type"]):
            return choice
    kinds = " or ".join(dict.fromkeys(KINDS[choice["type"]] for choice in choices))
    raise FieldError(field, value, f"it must be {kinds}.", f"{place} is {shown(value)}")


def _check_number(field: str, value: Any, schema: Schema, place: str) -> None:
    # Compared, not converted, because an integer may have hundreds of digits. NaN is in no interval.
    largest = sys.float_info.max
    low, high = schema.get("minimum", -largest), schema.get("maximum", largest)
    above = schema.get("exclusiveMinimum", -math.inf)
    if above < value and low <= value <= high:
        return
    limits = [f"at least {low}"] * ("minimum" in schema) + [f"above {above}"] * ("exclusiveMinimum" in schema)
    limits += [f"at most {high}"] * ("maximum" in schema)
    remedy = f"it must be {' and '.join(limits)}." if limits else "give a finite number."
    raise FieldError(field, value, remedy, f"{place} is {shown(value)}")


def _check_string(field: str, value: Any, schema: Schema, place: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise FieldError(
            field,
            value,
            "correct or remove it.",
            f"{place} holds an unpaired surrogate, which UTF-8 cannot encode",
        )
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", len(value))
    if not shortest <= len(value) <= longest:
        raise FieldError(
            field, value, f"{shortest} to {longest} are allowed.", f"{place} has {len(value)} characters"
        )


def _check_array(field: str, value: Any, schema: Schema, place: str) -> None:
    fewest, largest = schema.get("minItems", 0), schema.get("maxItems", len(value))
    if not fewest <= len(value) <= largest:
        raise FieldError(
            field, value, f"{fewest} to {largest} are allowed.", f"{place} has {len(value)} items"
        )
    for number, item in enumerate(value):
        check(field, item, schema["items"], f"{place}[{number}]")


def _check_object(field: str, value: Any, schema: Schema, place: str) -> None:
    for key in schema.get("required", ()):
        if key not in value:
            raise FieldError(field, value, "give one.", f"{place} has no {key}")
    if len(value) > schema.get("maxProperties", len(value)):
        limit = f"0 to {schema['maxProperties']} are allowed."
        raise FieldError(field, value, limit, f"{place} has {len(value)} fields")
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for key, item in value.items():
        if others:
            _check_string(field, key, {}, place)
        elif key not in known:
            raise FieldError(
                field,
                value,
                f"known: {', '.join(known)}.",
                f"{place} has no field {shown(key)}",
            )
        if item is not None:
            check(field, item, known.get(key, others), f"{place}.{key[:LONGEST_TEXT]}")


CHECKS = {
    "number": _check_number,
    "integer": _check_number,
    "string": _check_string,
    "array": _check_array,
    "object": _check_object,
}


def is_of(value: Any, kind: str) -> bool:
    """Whether a value parsed from JSON has a schema's type."""
    if isinstance(value, bool):
        return kind == "boolean"
    types_of: dict[str, Any] = {
        "number": (int, float),
        "integer": int,
        "string": str,
        "boolean": bool,
        "array": list,
        "object": dict,
    }
    return isinstance(value, types_of[kind])


def shown(value: Any) -> str:
    """A value as shortened JSON, so that a client's long text is not repeated."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
