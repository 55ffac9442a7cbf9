"""The OpenAPI 3.1 document, from the table of routes and the Structs that they name: nothing of it is written twice."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from troupellm.protocol.api.chat import AnthropicErrorBody, ErrorBody
from troupellm.protocol.api.ollama import OllamaError
from troupellm.server.base.errors import ErrorShape
from troupellm.server.base.router import MAX_TAIL, Route
from troupellm.server.openapi.schemas import Schemas, parameters

_BODIES: dict[ErrorShape, Any] = {
    "openai": ErrorBody,
    "responses": ErrorBody,
    "anthropic": AnthropicErrorBody,
    "ollama": OllamaError,
}
_EVERYWHERE = (400, 403, 421, 431, 500, 503)
_WITH_BODY = (408, 413, 415, 429)
_TEXTS = {
    400: "The request is wrong: param names the field, message the allowed range.",
    401: "The key is missing or wrong.",
    403: "The page that sends this may not (see --allowed-origins), or the key may not use this.",
    404: "There is no such model, or no such object.",
    408: "The body did not arrive in time.",
    409: "The object is not in a state that allows this.",
    413: "The body is too large.",
    415: "The body's media type or encoding is not taken.",
    421: "The Host header names another server (see --allowed-hosts).",
    429: "The server is full, or the key has used what it may: try again later.",
    431: "Target and headers are too large.",
    500: "The request could not be executed; sending it again will not help.",
    503: "The server starts, drains, has no worker, or is full (see --overload-status): try again later.",
    529: "The server is full: try again later.",
}
_STREAM = "Server-sent events; the data of each is one of the schemas that x-event-schemas lists{end}."
_LINES = "JSON texts, one a line; each is one of the schemas that x-event-schemas lists."
_PART = re.compile(r"[A-Za-z0-9]+")


def document(routes: Sequence[Route], *, version: str, keys: bool, root_path: str = "") -> dict[str, Any]:
    """The document as plain values.

    Args:
        keys: whether the server asks for API keys.
        root_path: prefix at which a proxy serves this.
    """
    schemas = Schemas(
        [route.body for route in routes if route.body is not None],
        [
            *(route.response for route in routes if route.response is not None),
            *(event for route in routes for event in route.events),
            *_BODIES.values(),
        ],
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(_path(route), {})[route.method.lower()] = _operation(route, schemas, keys)
    return {
        "openapi": "3.1.0",
        "jsonSchemaDialect": "https://json-schema.org/draft/2020-12/schema",
        "info": {
            "title": "Troupe",
            "version": version,
            "description": "An LLM inference server that speaks OpenAI's, Anthropic's and Ollama's APIs.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": root_path.rstrip("/") or "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {
                "apiKey": {"type": "http", "scheme": "bearer", "description": "An API key of the server."},
                "xApiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "adminKey": {"type": "http", "scheme": "bearer", "description": "The admin key."},
            },
        },
    }


def _path(route: Route) -> str:
    return f"{route.path}{{name}}" if route.tail else route.path


def _operation(route: Route, schemas: Schemas, keys: bool) -> dict[str, Any]:
    path = _path(route)
    words = [route.method.lower(), *_PART.findall(path)]
    operation: dict[str, Any] = {
        "operationId": "_".join(words).lower(),
        "summary": route.summary,
        "tags": [route.scope if route.scope != "api" else _tag(path)],
        "responses": {str(route.status): _answer(route, schemas)} | _problems(route, schemas, keys),
        "security": _security(route, keys),
    }
    named = [_path_parameter(name) for name in re.findall(r"\{(\w+)\}", path)]
    asked = [] if route.query is None else parameters(route.query)
    if named or asked:
        operation["parameters"] = named + asked
    if route.body is not None:
        content = {"application/json": {"schema": schemas.of(route.body)}}
        operation["requestBody"] = {"required": True, "content": content}
    elif route.media:
        operation["requestBody"] = {"required": True, "content": {media: _form(media, route) for media in route.media}}
    return operation


def _tag(path: str) -> str:
    parts = [part for part in path.split("/") if part and not part.startswith("{")]
    return parts[1] if len(parts) > 1 else parts[0]


def _security(route: Route, keys: bool) -> list[dict[str, list[str]]]:
    if route.scope == "admin":
        return [{"adminKey": []}]
    return [{"apiKey": []}, {"xApiKey": []}] if keys and route.scope == "api" else []


def _path_parameter(name: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1, "maxLength": MAX_TAIL}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _form(media: str, route: Route) -> dict[str, Any]:
    if media != "multipart/form-data":
        return {"schema": {"type": "string", "contentMediaType": media}}
    file = {"type": "string", "format": "binary", "contentMediaType": "application/octet-stream"}
    asked = [] if route.form is None else parameters(route.form)
    fields = {"file": file} | {field["name"]: field["schema"] for field in asked}
    needed = ["file", *(field["name"] for field in asked if field["required"])]
    return {"schema": {"type": "object", "properties": fields, "required": needed}}


def _answer(route: Route, schemas: Schemas) -> dict[str, Any]:
    schema = {} if route.response is None else schemas.of(route.response)
    if route.response is None and route.answers != "application/json":
        schema = {"type": "string"}
    content: dict[str, Any] = {route.answers: {"schema": schema}}
    if route.streams:
        end = ", and `[DONE]` at the end" if route.error_shape == "openai" and not route.own_end else ""
        errors = () if route.own_end else (_BODIES[route.error_shape],)
        text = _LINES if route.lines else _STREAM.format(end=end)
        content["application/x-ndjson" if route.lines else "text/event-stream"] = {
            "schema": {"type": "string", "description": text},
            "x-event-schemas": [schemas.of(event) for event in (*route.events, *errors)],
        }
    text = "The answer."
    if route.streams:
        text = "The answer; a stream of events when the request has `stream: true`."
        if _streams_unasked(route):
            text = "A stream of events; one answer when the request has `stream: false`."
    return {"description": text, "headers": _headers(200), "content": content}


def _streams_unasked(route: Route) -> bool:
    if route.lines:
        return True
    fields = () if route.query is None else msgspec.structs.fields(route.query)
    return any(field.name == "stream" and field.default is True for field in fields)


def _problems(route: Route, schemas: Schemas, keys: bool) -> dict[str, Any]:
    statuses = {*_EVERYWHERE, *route.problems}
    if route.scope == "admin" or (keys and route.scope == "api"):
        statuses.add(401)
    if route.body is not None or route.media:
        statuses.update(_WITH_BODY)
        statuses.update({529} if route.error_shape == "anthropic" else ())
    if "{" in _path(route) or "model" in getattr(route.body, "__struct_fields__", ()):
        statuses.add(404)
    answers = {}
    for status in sorted(statuses):
        kind = _BODIES[route.error_shape]
        if route.scope == "open" and status == 503 and route.response is not None:
            kind = route.response  # what a probe says is not an error of the request
        content = {"application/json": {"schema": schemas.of(kind)}}
        answers[str(status)] = {"description": _TEXTS[status], "headers": _headers(status), "content": content}
    return answers


def _headers(status: int) -> dict[str, Any]:
    headers: dict[str, Any] = {"x-request-id": {"required": True, "schema": {"type": "string"}}}
    if status in (429, 503, 529):
        headers["retry-after"] = {"required": True, "schema": {"type": "string"}, "description": "Seconds."}
    if status == 401:
        headers["www-authenticate"] = {"required": True, "schema": {"type": "string"}}
    return headers
