"""The OpenAPI description, generated from protocol.FIELDS."""

from typing import Any

from speccascade_jax import __version__
from speccascade_jax.serving.protocol import FIELDS, REQUIRED

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
REFUSALS = {
    400: "The request is wrong",
    401: "No valid API key",
    404: "No such model",
    408: "The body came too slowly",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "The queue is full",
    500: "The server failed",
    503: "Compiling or stopping",
    504: "The request took too long",
}


def description() -> dict[str, Any]:
    """The OpenAPI 3.1 description of all paths."""
    refusals = {
        str(status): {"description": about, "content": {"application/json": {"schema": ERROR}}}
        for status, about in REFUSALS.items()
    }

    def posted(kind: str, about: str) -> dict[str, Any]:
        fields, required = FIELDS[kind], REQUIRED[kind]
        properties = {
            name: {"description": field.about, "anyOf": [field.schema, {"type": "null"}]}
            for name, field in fields.items()
        }
        properties[required] = {"description": fields[required].about, **fields[required].schema}
        schema = {
            "type": "object",
            "required": [required],
            "properties": properties,
            "additionalProperties": False,
        }
        answer = {
            "description": "The answer",
            "content": {
                "application/json": {"schema": {"type": "object"}},
                "text/event-stream": {"schema": {"type": "string"}},
            },
        }
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        return {
            "post": {
                "summary": about,
                "security": [{}, {"key": []}],
                "requestBody": body,
                "responses": {"200": answer, **refusals},
            }
        }

    def read(about: str, more: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
        responses = {"200": {"description": about, "content": {kind: {}}}, **more}
        return {"get": {"summary": about, "security": [{}, {"key": []}], "responses": responses}}

    guarded = {status: refusals[status] for status in ("401", "404")}
    named = read("One model", guarded)
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    named["get"]["parameters"] = [name]
    not_yet = {"503": {"description": "Not now"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "speccascade_jax", "version": __version__},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/v1/completions": posted("completion", "Continue or translate texts"),
            "/v1/chat/completions": posted("chat", "Continue a conversation"),
            "/v1/models": read("What is served", guarded),
            "/v1/models/{name}": named,
            "/health": read("Alive", not_yet),
            "/ready": read("Compiled", not_yet),
            "/metrics": read("Prometheus metrics", {}, "text/plain"),
        },
    }
