"""OpenAI's wire format: the fields of a request and how they are parsed.

A request has all fields of Settings and OpenAI's own. Each is declared once: requests are checked against
these declarations, and the OpenAPI description is generated from them.
"""

import dataclasses
import difflib
import typing
from typing import Any, NamedTuple

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.transforms import Dialect
from speccascade_jax.inference.inputs import parse_json
from speccascade_jax.serving.schema import Schema, check, schema_of, shown
from speccascade_jax.settings import Settings

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
MOST_PROMPTS = 128
ALONE: dict[str, Any] = {"method": "verifier"}  # the meaning of `speculative: false`
WIRE_NAMES = {"max_new_tokens": ("max_tokens", "max_completion_tokens")}  # OpenAI's names for settings


class Refused(Exception):
    """An HTTP error response, with its status and the contents of OpenAI's error object. `param` is the field
    that caused it, if any."""

    def __init__(
        self,
        reason: str | Exception,
        *,
        status: int = 400,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ):
        super().__init__(str(reason))
        self.status, self.headers = status, headers or {}
        param = reason.field if isinstance(reason, FieldError) else None
        self.body = {"error": {"message": str(reason), "type": kind, "param": param, "code": code}}


class Field(NamedTuple):
    """A field of a request, with the part of its JSON schema that does not depend on the model."""

    about: str
    schema: Schema
    setting: str | None = None  # the field of Settings that it sets
    several: bool = False  # whether that field is always a tuple
    dialect: Dialect | None = None  # values accepted from clients of other servers


Fields = dict[str, Field]


def number(about: str, low: float, high: float, kind: str = "integer") -> Field:
    return Field(about, {"type": kind, "minimum": low, "maximum": high})


def flag(about: str) -> Field:
    return Field(about, {"type": "boolean"})


TEXT: Schema = {"type": "string"}
MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]},
        "content": TEXT,
        "name": TEXT,
    },
}
COMMON: Fields = {
    "model": Field("A name from /v1/models; optional if there is only one.", TEXT),
    "n": number("How many answers to a prompt.", 1, 128),
    "stream": flag("Send the answer as it is written, as server-sent events."),
    "stream_options": Field(
        "include_usage: send the usage at the end of a stream.",
        {
            "type": "object",
            "properties": {"include_usage": {"type": "boolean"}},
            "additionalProperties": False,
        },
    ),
    "user": Field("Ignored.", TEXT),
    "speculative": flag("False: the largest model alone."),
    "origin": flag("Say who wrote each token."),
    "presence_penalty": number("Only 0 is known.", 0, 0, "number"),
    "frequency_penalty": number("Only 0 is known.", 0, 0, "number"),
}
COMPLETION: Fields = {
    "prompt": Field(
        "The source text, or several.",
        {"anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1, "maxItems": MOST_PROMPTS}]},
    ),
    "logprobs": number("Log probabilities of the tokens and of this many most likely ones.", 0, 5),
    "echo": Field("Only false is known.", {"type": "boolean", "enum": [False]}),
    "best_of": number("As many as n.", 1, 128),
}
CHAT: Fields = {
    "messages": Field(
        "The conversation so far.", {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 1024}
    ),
    "logprobs": flag("Give the tokens' log probabilities."),
    "top_logprobs": number("How many most likely tokens to include.", 0, 20),
}
REQUIRED = {"completion": "prompt", "chat": "messages"}


def settings_fields(settings: type[Settings] = Settings) -> Fields:
    """A request field for each field of Settings, under OpenAI's names where they exist."""
    annotations, fields = typing.get_type_hints(settings), {}
    for setting in dataclasses.fields(settings):
        schema = schema_of(annotations[setting.name], setting.metadata)
        dialect = setting.metadata.get("dialect")
        if dialect is not None:
            schema.pop("exclusiveMinimum", None)
            schema["minimum"] = dialect.least
        several = typing.get_origin(annotations[setting.name]) is tuple
        about = setting.metadata.get("help", f"{setting.name}: see the documentation of decoding.")
        for name in WIRE_NAMES.get(setting.name, (setting.name,)):
            fields[name] = Field(about, schema, setting.name, several, dialect)
    return fields


def request_fields(kind: str, settings: type[Settings] = Settings) -> Fields:
    """All fields of a request; kind: completion or chat."""
    return {**settings_fields(settings), **COMMON, **{"completion": COMPLETION, "chat": CHAT}[kind]}


FIELDS = {kind: request_fields(kind) for kind in REQUIRED}


@dataclasses.dataclass(frozen=True)
class ParsedRequest:
    """A request whose fields have the right types. The model checks their values later."""

    model: str | None
    prompts: tuple[str, ...]  # for completions
    messages: tuple[dict[str, str], ...]  # for a chat
    n: int
    changes: dict[str, Any]  # the fields of Settings that the request sets
    names: dict[str, str]  # their names in the request
    stream: bool
    include_usage: bool
    logprobs: int | None  # number of most likely tokens; None: no log probabilities
    origin: bool

    @property
    def text_field(self) -> str:
        """The field that contains the text to decode."""
        return "messages" if self.messages else "prompt"


def parse(body: bytes, kind: str, fields: Fields | None = None) -> ParsedRequest:
    """Parses a request's body. kind: completion or chat; fields: replaces those of FIELDS. Raises FieldError
    for an invalid field, and Refused for a body that is not an object."""
    fields = FIELDS[kind] if fields is None else fields
    values = {name: value for name, value in json_object(body).items() if value is not None}
    for name, value in values.items():
        if name not in fields:
            near = difflib.get_close_matches(name[:50], fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(fields))}."
            raise FieldError(shown(name)[1:-1], value, hint, f"there is no field {shown(name)}")
        check(name, value, fields[name].schema)
    if REQUIRED[kind] not in values:
        raise FieldError(REQUIRED[kind], None, "give one.", f"{REQUIRED[kind]} is missing")
    changes, names = settings_of(values, fields)
    prompt = values.get("prompt", ())
    return ParsedRequest(
        values.get("model"),
        (prompt,) if isinstance(prompt, str) else tuple(prompt),
        tuple(values.get("messages", ())),
        answers_of(values),
        changes,
        names,
        values.get("stream", False),
        usage_of(values),
        logprobs_of(values, kind),
        values.get("origin", False),
    )


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises Refused if it is not one."""
    try:
        value = parse_json(body.decode(), "the body")
    except UnicodeDecodeError:
        raise Refused("the body is not UTF-8.") from None
    except ValueError as error:
        raise Refused(error) from None
    if not isinstance(value, dict):
        raise Refused(f"the body is {shown(value)}; it must be a JSON object.")
    return value


def answers_of(values: dict[str, Any]) -> int:
    n = values.get("n", 1)
    if values.get("best_of", n) != n:
        raise FieldError(
            "best_of",
            values["best_of"],
            "only answers that are sent are decoded: leave it out.",
            f"best_of is {values['best_of']}, and n is {n}",
        )
    return n


def usage_of(values: dict[str, Any]) -> bool:
    """Whether a stream ends with the usage."""
    options = values.get("stream_options")
    if options is not None and not values.get("stream"):
        raise FieldError(
            "stream_options",
            options,
            "give stream: true, or leave it out.",
            "stream_options go with a stream",
        )
    return (options or {}).get("include_usage") or False


def logprobs_of(values: dict[str, Any], kind: str) -> int | None:
    """The number of most likely tokens whose log probabilities are requested; None: no log probabilities at
    all."""
    if kind == "completion":
        return values.get("logprobs")
    if values.get("logprobs"):
        return values.get("top_logprobs", 0)
    if "top_logprobs" in values:
        raise FieldError(
            "top_logprobs",
            values["top_logprobs"],
            "give logprobs: true, or leave it out.",
            "top_logprobs go with logprobs",
        )
    return None


def settings_of(values: dict[str, Any], fields: Fields) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of Settings that a request sets, and their names in the request."""
    changes: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in values.items():
        setting = fields[name].setting
        if setting is None:
            continue
        meant = setting_of(value, fields[name])
        if changes.get(setting, meant) != meant:
            raise FieldError(name, value, "give one of the two.", f"{name} and {names[setting]} differ")
        changes[setting], names[setting] = meant, name
    for setting, meant in ALONE.items() if values.get("speculative") is False else ():
        if changes.get(setting, meant) != meant:
            raise FieldError(
                "speculative",
                False,
                "give one of the two.",
                f"speculative is false, and {setting} is {shown(changes[setting])}",
            )
        changes[setting] = meant
    return changes, names


def setting_of(value: Any, field: Field) -> Any:
    """A field's value in the form that Settings uses."""
    dialect = field.dialect
    if dialect is not None and dialect.least <= value < dialect.below:
        return dialect.meaning
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, dict):
        return {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}
    return (value,) if field.several else value
