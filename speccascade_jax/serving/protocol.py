"""OpenAI's wire format: what a request may hold, and the objects of an answer.

FIELDS is spelt once: requests are checked against it, and the OpenAPI description is made of it.
"""

import dataclasses
import difflib
import json
import math
from typing import Any, NamedTuple

from speccascade_jax.inference.inputs import check_text, parse_json
from speccascade_jax.settings import Settings

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
MOST_STOPS, LONGEST_STOP = 16, 256  # stop texts a request, characters each
MOST_PROMPTS = 128


class Refused(Exception):
    """A request that is answered by an error: its HTTP status, and what OpenAI's error object says."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None,
                 kind: str = "invalid_request_error", headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Field(NamedTuple):
    """A field of a request: its JSON schema, as far as it can be told before the model is known."""

    about: str
    schema: dict[str, Any]


def number(about: str, low: float | None = None, high: float | None = None, kind: str = "number") -> Field:
    bounds = {"minimum": low, "maximum": high}
    return Field(about, {"type": kind, **{key: value for key, value in bounds.items() if value is not None}})


def flag(about: str) -> Field:
    return Field(about, {"type": "boolean"})


TEXT = {"type": "string"}
LENGTH = number("The most tokens of the answer.", 1, 2**31 - 1, "integer")
STOP = {**TEXT, "minLength": 1, "maxLength": LONGEST_STOP}
COMMON = {
    "model": Field("A name of /v1/models; may be left out where there is one.", TEXT),
    "n": number("How many answers to a prompt.", 1, 128, "integer"),
    "max_tokens": LENGTH,
    "temperature": number("0 is greedy.", 0),
    "top_p": number("Sample among the likeliest tokens that reach this mass.", 0, 1),
    "top_k": number("Sample among the k likeliest tokens; 0 or -1: all.", -1, 2**31 - 1, "integer"),
    "min_p": number("Sample among tokens at least this share as likely as the likeliest.", 0, 1),
    "seed": number("With the prompt and the settings it fixes the answer.", -2**63, 2**63 - 1, "integer"),
    "stop": Field("Texts that end an answer.",
                  {"anyOf": [STOP, {"type": "array", "items": STOP, "maxItems": MOST_STOPS}]}),
    "stream": flag("Send the answer as it is written, as server-sent events."),
    "stream_options": Field("include_usage: send the usage at the end of a stream.",
                            {"type": "object", "properties": {"include_usage": {"type": "boolean"}},
                             "additionalProperties": False}),
    "user": Field("Ignored.", TEXT),
    "method": Field("The deferral rule, or verifier or drafter.", TEXT),
    "alpha": Field("The rule's lenience; of a hierarchy, one number or one for each verifier.",
                   {"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"},
                                                   "minItems": 1, "maxItems": 16}]}),
    "block_size": Field("Tokens drafted a round, up to the server's; or adaptive, where the server's is.",
                        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 2**15},
                                   {**TEXT, "enum": ["adaptive"]}]}),
    "max_block_size": number("The most that are drafted where blocks are adaptive, up to the server's.", 1,
                             2**15, "integer"),
    "speculative": flag("False: the verifier by itself."),
    "origin": flag("Say who wrote each token."),
    "presence_penalty": number("Only 0 is known.", 0, 0),
    "frequency_penalty": number("Only 0 is known.", 0, 0),
}
COMPLETION = COMMON | {
    "prompt": Field("The source text, or several.",
                    {"anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1,
                                      "maxItems": MOST_PROMPTS}]}),
    "logprobs": number("Log probabilities of the tokens and of so many likeliest ones.", 0, 5, "integer"),
    "echo": Field("Only false is known.", {"type": "boolean", "enum": [False]}),
    "best_of": number("As many as n.", 1, 128, "integer"),
}
MESSAGE = {"type": "object", "required": ["role", "content"], "properties": {
    "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]}, "content": TEXT,
    "name": TEXT}}
CHAT = COMMON | {
    "messages": Field("The conversation so far.", {"type": "array", "items": MESSAGE, "minItems": 1,
                                                   "maxItems": 1024}),
    "max_completion_tokens": LENGTH,
    "logprobs": flag("Give the tokens' log probabilities."),
    "top_logprobs": number("And those of so many likeliest ones.", 0, 20, "integer"),
}
FIELDS = {"completion": COMPLETION, "chat": CHAT}
REQUIRED = {"completion": "prompt", "chat": "messages"}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request whose fields are of the right types; whether their values fit the model is told later."""

    model: str | None
    prompts: tuple[str, ...]           # of completions
    messages: tuple[dict[str, str], ...]  # of a chat
    n: int
    changes: dict[str, Any]            # fields of Settings that the request names
    stream: bool
    include_usage: bool
    logprobs: int | None               # how many of the likeliest tokens; None: no log probabilities
    origin: bool


def parse(body: bytes, kind: str) -> Asked:
    """A request's body; kind: completion or chat. Raises Refused."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise Refused("the body is not UTF-8.") from None
    try:
        given = parse_json(text, "the body")
    except ValueError as error:
        raise Refused(str(error)) from None
    if not isinstance(given, dict):
        raise Refused(f"the body is {_shown(given)}; it must be a JSON object.")
    fields = FIELDS[kind]
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in fields:
            near = difflib.get_close_matches(name[:50], fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(fields))}."
            raise Refused(f"there is no field {_shown(name)}; {hint}", _shown(name)[1:-1])
        _check(name, value, fields[name].schema, name)
    if REQUIRED[kind] not in given:
        raise Refused(f"{REQUIRED[kind]} is missing.", REQUIRED[kind])
    return _asked(given, kind)


def _asked(given: dict[str, Any], kind: str) -> Asked:
    prompt = given.get("prompt", ())
    n = given.get("n", 1)
    if given.get("best_of", n) != n:
        raise Refused(f"best_of is {given['best_of']}, n is {n}: only answers that are sent are decoded; "
                      "leave best_of out.", "best_of")
    if "stream_options" in given and not given.get("stream"):
        raise Refused("stream_options go with stream: true.", "stream_options")
    logprobs = given.get("logprobs")
    if kind == "chat":
        logprobs = given.get("top_logprobs", 0) if logprobs else None
        if "top_logprobs" in given and logprobs is None:
            raise Refused("top_logprobs goes with logprobs: true.", "top_logprobs")
    return Asked(given.get("model"), (prompt,) if isinstance(prompt, str) else tuple(prompt),
                 tuple(given.get("messages", ())), n, _changes(given), given.get("stream", False),
                 given.get("stream_options", {}).get("include_usage", False), logprobs,
                 given.get("origin", False))


def _changes(given: dict[str, Any]) -> dict[str, Any]:
    """What a request names of Settings' fields, under their names."""
    names = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
    same = {field.name for field in dataclasses.fields(Settings)} - {"hand_over"}
    changes = {names.get(name, name): value for name, value in given.items()
               if name in same or name in names}
    if isinstance(changes.get("alpha"), list):
        changes["alpha"] = tuple(changes["alpha"])
    if "stop" in changes:
        stop = changes["stop"]
        changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(UNFINISHED in one for one in changes["stop"]):
            raise Refused("stop holds U+FFFD, which stands for an unfinished character: leave it out.",
                          "stop")
    for name, off in (("top_k", 1), ("top_p", 1e-9)):
        if changes.get(name, off) < off:  # others' way to say: all tokens; a top_p of 0 keeps the likeliest
            changes[name] = None if name == "top_k" else off
    if given.get("speculative") is False:
        if changes.get("method", "verifier") != "verifier":
            raise Refused(f"speculative is false, which is the verifier by itself, but method is "
                          f"{_shown(changes['method'])}: give one of the two.", "speculative")
        changes["method"] = "verifier"
    return changes


def _check(name: str, value: Any, schema: dict[str, Any], where: str) -> None:
    """Raises Refused, naming `where`, unless a value is as its schema says."""
    if "anyOf" in schema:
        fitting = [one for one in schema["anyOf"] if _is(value, one["type"])]
        if not fitting:
            kinds = " or ".join(ARTICLES[one["type"]] for one in schema["anyOf"])
            raise Refused(f"{where} is {_shown(value)}; it must be {kinds}.", name)
        schema = fitting[0]
    kind = schema["type"]
    if not _is(value, kind):
        raise Refused(f"{where} is {_shown(value)}; it must be {ARTICLES[kind]}.", name)
    if "enum" in schema and value not in schema["enum"]:
        raise Refused(f"{where} is {_shown(value)}; known: {', '.join(map(_shown, schema['enum']))}.", name)
    if kind in ("number", "integer"):
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        if not (low <= value <= high and (kind == "integer" or math.isfinite(value))):
            raise Refused(f"{where} is {_shown(value)}; it lies in [{low}, {high}].", name)
    if kind == "string":
        try:
            check_text(value, where)
        except ValueError as error:
            raise Refused(str(error), name) from None
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            raise Refused(f"{where} has {len(value)} characters; {schema.get('minLength', 0)} to "
                          f"{schema['maxLength']} are allowed.", name)
    if kind == "array":
        least, most = schema.get("minItems", 0), schema.get("maxItems", len(value))
        if not least <= len(value) <= most:
            raise Refused(f"{where} has {len(value)} items; {least} to {most} are allowed.", name)
        for n, item in enumerate(value):
            _check(name, item, schema["items"], f"{where}[{n}]")
    if kind == "object":
        for key in schema.get("required", ()):
            if key not in value:
                raise Refused(f"{where} has no {key}.", name)
        for key, item in value.items():
            if key in schema["properties"]:
                if item is not None:
                    _check(name, item, schema["properties"][key], f"{where}.{key}")
            else:
                raise Refused(f"{where} has no field {_shown(key)}; known: "
                              f"{', '.join(schema['properties'])}.", name)


ARTICLES = {"number": "a number", "integer": "a whole number", "string": "a text", "boolean": "true or false",
            "array": "a list", "object": "an object"}


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    types: dict[str, Any] = {"number": (int, float), "integer": int, "string": str, "boolean": bool,
                             "array": list, "object": dict}
    return isinstance(value, types[kind])


def _shown(value: Any) -> str:
    """A value as a short piece of JSON; a text of the client's is not repeated at length."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
