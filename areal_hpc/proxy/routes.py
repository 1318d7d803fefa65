"""What a route is, and what the routes look like from outside: an OpenAPI description."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from areal_hpc import __version__
from areal_hpc.proxy.dialects import openai_forms
from areal_hpc.proxy.dialects.dialect import EventStream, Refused
from areal_hpc.proxy.sessions import Session

Result = bytes | EventStream
Handler = Callable[[Session | None, bytes], Coroutine[Any, Any, Result]]
"""(session that the key opened, request body) -> response body, whole or as events."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    method: Literal["GET", "POST"]
    opened_by: Literal["admin", "session", "anyone"]
    """Whose key opens it. That is settled before the request's body is read."""
    answer: Handler
    request: type[msgspec.Struct] | None = None
    """What the body holds; None when it is not read."""
    refused: Refused = openai_forms.error
    """The body of an error."""
    form: str = "application/json"
    """Content type of the answer."""
    streams: bool = False
    """It may answer with server-sent events."""


def with_and_without_v1(routes: Mapping[str, Route]) -> dict[str, Route]:
    """SDKs differ in whether `/v1` is part of the address they are given."""
    return {prefix + path: route for prefix in ("", "/v1") for path, route in routes.items()}


REFERENCE = "#/components/schemas/{name}"
_KEYS: dict[str, dict[str, Any]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        }
    },
}
"""What all dialects' errors have in common."""


def described(routes: Mapping[str, Route]) -> bytes:
    """The routes as an OpenAPI document, JSON."""
    structs = {route.request for route in routes.values() if route.request is not None}
    ordered = sorted(structs, key=lambda one: one.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=REFERENCE)
    bodies = dict(zip(ordered, schemas, strict=True))
    paths = {
        path: {route.method.lower(): _operation(route, bodies)} for path, route in routes.items()
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "The agent proxy of areal_hpc", "version": __version__},
            "paths": paths,
            "components": {
                "schemas": {**components, "Refusal": _ERROR},
                "securitySchemes": _KEYS,
            },
        }
    )


def _operation(
    route: Route, bodies: Mapping[type[msgspec.Struct], dict[str, Any]]
) -> dict[str, Any]:
    kind = "object" if route.form == "application/json" else "string"
    answer: dict[str, Any] = {route.form: {"schema": {"type": kind}}}
    if route.streams:
        answer["text/event-stream"] = {"schema": {"type": "object", "required": ["data"]}}
    refusal = {"application/json": {"schema": {"$ref": REFERENCE.format(name="Refusal")}}}
    operation: dict[str, Any] = {
        "x-opened-by": route.opened_by,
        "responses": {
            "200": {"description": "The answer.", "content": answer},
            "4XX": {"description": "The request is at fault.", "content": refusal},
            "5XX": {"description": "The moment is at fault.", "content": refusal},
        },
    }
    if route.opened_by != "anyone":
        operation["security"] = [{name: []} for name in _KEYS]
    if route.request is not None:
        schema = bodies[route.request]
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return operation
