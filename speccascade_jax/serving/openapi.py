"""The OpenAPI description, made of protocol.FIELDS."""

from typing import Any

from speccascade_jax import __version__
from speccascade_jax.serving.protocol import FIELDS, REQUIRED

ERROR = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type", "param", "code"], "properties": {
        "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]}}}}}
REFUSALS = {400: "The request is wrong", 401: "No valid API key", 404: "No such model",
            408: "The body came too slowly", 413: "The body is too large", 415: "The body is not JSON",
            429: "The queue is full", 500: "The server failed", 503: "Compiling or stopping",
            504: "The request took too long"}


def description() -> dict[str, Any]:
    """What every path takes and gives, as OpenAPI 3.1."""
    refusals = {str(status): {"description": about, "content": {"application/json": {"schema": ERROR}}}
                for status, about in REFUSALS.items()}

    def asking(kind: str, about: str) -> dict[str, Any]:
        properties = {name: {"description": field.about, "anyOf": [field.schema, {"type": "null"}]}
                      for name, field in FIELDS[kind].items() if name != REQUIRED[kind]}
        needed = FIELDS[kind][REQUIRED[kind]]
        properties[REQUIRED[kind]] = {"description": needed.about, **needed.schema}
        schema = {"type": "object", "required": [REQUIRED[kind]], "properties": properties,
                  "additionalProperties": False}
        answer = {"description": "The answer", "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}}}}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        return {"post": {"summary": about, "security": [{}, {"key": []}], "requestBody": body,
                         "responses": {"200": answer, **refusals}}}

    def telling(about: str, more: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
        found = {"200": {"description": about, "content": {kind: {}}}, **more}
        return {"get": {"summary": about, "security": [{}, {"key": []}], "responses": found}}

    some = {status: refusals[status] for status in ("401", "404")}
    named = telling("One model", some)
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    named["get"]["parameters"] = [name]
    not_yet = {"503": {"description": "Not now"}}
    return {
        "openapi": "3.1.0", "info": {"title": "speccascade_jax", "version": __version__},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "paths": {"/v1/completions": asking("completion", "Continue or translate texts"),
                  "/v1/chat/completions": asking("chat", "Continue a conversation"),
                  "/v1/models": telling("What is served", some), "/v1/models/{name}": named,
                  "/health": telling("Alive", not_yet), "/ready": telling("Compiled", not_yet),
                  "/metrics": telling("Prometheus metrics", {}, "text/plain")}}
