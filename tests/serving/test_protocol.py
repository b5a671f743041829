"""A request has the fields of Settings, whatever they are."""

import dataclasses
import json
from typing import Literal

import pytest

pytest.importorskip("starlette")

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.transforms import TRUNCATIONS
from speccascade_jax.serving.openapi import description
from speccascade_jax.serving.protocol import ALONE, FIELDS, WIRE_NAMES, Refused, parse, request_fields
from speccascade_jax.serving.schema import check, schema_of
from speccascade_jax.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoreSettings(Settings):
    """Settings of some later version."""

    tail: float | None = dataclasses.field(
        default=None,
        metadata={"help": "Leave the tail out.", "low": 0.0, "high": float("inf"), "above": True},
    )
    bans: tuple[str, ...] = ()
    shape: Literal["round", "flat"] = "round"
    count: int = dataclasses.field(default=1, metadata={"low": 1, "high": 9})


MORE = {kind: request_fields(kind, MoreSettings) for kind in FIELDS}


def changes(fields=None, **values):
    """What a request with these fields changes."""
    return parse(json.dumps({"prompt": "1", **values}).encode(), "completion", fields).changes


def test_every_setting_is_a_field_of_both_kinds_of_request():
    for setting in dataclasses.fields(Settings):
        for name in WIRE_NAMES.get(setting.name, (setting.name,)):
            for kind in FIELDS:
                assert FIELDS[kind][name].setting == setting.name
    paths = description()["paths"]
    schema = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"].keys() == FIELDS["completion"].keys()
    for name, truncation in TRUNCATIONS.items():
        assert schema["properties"][name]["description"] == truncation.summary


def test_a_setting_of_a_later_version_is_a_field_with_its_bounds():
    for kind in MORE:
        assert MORE[kind].keys() - FIELDS[kind].keys() == {"tail", "bans", "shape", "count"}
        field = MORE[kind]["tail"]
        assert (field.about, field.schema) == (
            "Leave the tail out.",
            {"type": "number", "exclusiveMinimum": 0.0},
        )
    values = {"tail": 2, "bans": "x", "shape": "flat", "count": 9}
    assert changes(MORE["completion"], **values) == {**values, "bans": ("x",)}
    assert changes(MORE["completion"], bans=["x", "y"]) == {"bans": ("x", "y")}
    for name, value in (
        ("tail", 0),
        ("tail", "x"),
        ("tail", 10**400),
        ("bans", 1),
        ("shape", "x"),
        ("count", 0),
        ("count", 10),
        ("count", 1.5),
        ("count", True),
    ):
        with pytest.raises(FieldError) as error:
            changes(MORE["completion"], **{name: value})
        assert (error.value.field, error.value.value) == (name, value)
    with pytest.raises(FieldError) as error:
        changes(tail=2)
    assert error.value.field == "tail"


def test_values_of_other_servers_clients_are_accepted():
    assert changes(top_k=-1) == changes(top_k=0) == {"top_k": None}
    assert changes(top_k=5, top_p=1, min_p=0) == {"top_k": 5, "top_p": 1, "min_p": 0}
    assert 0 < changes(top_p=0)["top_p"] < 1e-6
    assert changes(max_tokens=3) == changes(max_completion_tokens=3) == {"max_new_tokens": 3}
    assert changes(speculative=False) == changes(speculative=False, **ALONE) == ALONE
    assert changes(speculative=True, temperature=None) == {}
    assert changes(alpha=[0.1, 0.2], stop="x") == {"alpha": (0.1, 0.2), "stop": ("x",)}
    for name, value in (("top_k", -2), ("top_p", -1e-9), ("min_p", -1)):
        with pytest.raises(FieldError) as error:
            changes(**{name: value})
        assert (error.value.field, error.value.value) == (name, value)


@pytest.mark.parametrize("digits", [309, 400, 4000])
def test_numbers_of_hundreds_of_digits_are_out_of_range(digits):
    for schema in ({"type": "number"}, {"type": "integer"}, schema_of(float | tuple[float, ...], {})):
        for value in (10**digits, -(10**digits)):
            with pytest.raises(FieldError) as error:
                check("alpha", value, schema)
            assert (error.value.field, error.value.value) == ("alpha", value)


def test_an_error_has_the_field_it_is_about_and_no_other():
    assert Refused(FieldError("n", 0, "give more.")).body["error"]["param"] == "n"
    assert Refused(ValueError("n is 0.")).body["error"]["param"] is None
