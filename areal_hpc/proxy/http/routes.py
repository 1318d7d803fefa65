"""Table of the proxy's routes, and its OpenAPI description."""

import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from areal_hpc import __version__
from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.reply import ReplyStream
from areal_hpc.proxy.dialects.dialect import ErrorFormatter, Exchange

_NAMED_PART_PATTERN = re.compile(r"\{(\w+)\}")
_VERSION_PATTERN = re.compile(r"^/v1[a-z]*(?=/)")


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """Reply of the model to a request, as a whole body or as a stream."""

    exchange: Exchange
    reply: bytes | ReplyStream


RouteResult = bytes | msgspec.Struct | ModelAnswer
"""Body of the answer, or a struct to encode as JSON; or a reply of the model."""


@dataclass(frozen=True, slots=True)
class Route:
    method: Literal["GET", "POST", "DELETE"]
    path: str
    """Path, in which one part may be a `{name}`: not empty, and with slashes only at the end."""
    opened_by: Literal["driver", "admin", "session", "control", "reader", "anyone"]
    """Key that opens it, checked before the request's body is read. `driver`: the key of the run's
    driver; `admin`: that or the admin key; `session`: the key of an agent; `control`: the control
    key of a session, which may be the same; `reader`: no key on loopback, else the metrics or the
    admin key."""
    answer: Callable[..., RouteResult | Coroutine[Any, Any, RouteResult]]
    """Handler. Its arguments are the session of the key, if any; then the decoded request, or
    without one the parameter of the path and those of the query."""
    request: type[msgspec.Struct] | None = None
    """Type of the body; None: the body is not decoded."""
    takes_query: bool = False
    """Whether the handler takes the query's parameters before the request."""
    error_formatter: ErrorFormatter | None = None
    """Formatter of errors; None: the format of the client's dialect."""
    answer_content_type: str = "application/json"
    json_type: Literal["object", "array"] = "object"
    """Type of the answer if it is JSON."""
    streams: bool = False
    """Whether it may answer with server-sent events."""
    calls_model: bool = False
    """Whether the session records the answer."""
    takes_facts: bool = False
    """Whether the handler takes the request's `CallFacts`, as its last argument."""
    is_open_after_session_end: bool = False
    passes_unknown_params: bool = False
    """Whether undeclared parameters are accepted; the handler then takes their names as well."""
    repeats_messages: bool = False
    """Whether a request mostly begins with the messages of the session's latest one."""
    needs_client_that_records: bool = False
    """Whether it is only for a session whose client records its own calls."""

    @property
    def unversioned_path(self) -> str:
        return _VERSION_PATTERN.sub("", self.path)

    @property
    def path_parameter(self) -> str:
        match = _NAMED_PART_PATTERN.search(self.path)
        return match[1] if match else ""


class Routes:
    def __init__(self, routes: Iterable[Route]) -> None:
        self._by_path: dict[str, dict[str, Route]] = {}
        self._named: dict[tuple[str, str], dict[str, Route]] = {}
        """Routes by the text before and after the parameter, the longest text after it first."""
        for route in routes:
            if route.path_parameter:
                before, _, after = _NAMED_PART_PATTERN.split(route.path)
                self._named.setdefault((before, after), {})[route.method] = route
            else:
                self._by_path.setdefault(route.path, {})[route.method] = route
        longest_first = sorted(self._named.items(), key=lambda item: -len(item[0][1]))
        self._named = dict(longest_first)

    def __iter__(self) -> Iterator[Route]:
        for methods in (*self._by_path.values(), *self._named.values()):
            yield from methods.values()

    def find_routes(self, path: str) -> tuple[Mapping[str, Route], str]:
        """Return the routes of a path by method, and the parameter in it, or an empty text."""
        methods = self._by_path.get(path)
        if methods is not None:
            return methods, ""
        for (before, after), methods in self._named.items():
            parameter = path[len(before) : len(path) - len(after)]
            if parameter and path.startswith(before) and path.endswith(after):
                return methods, parameter
        raise ProxyRequestError(404, f"there is no route {path}")


SCHEMA_REF_TEMPLATE = "#/components/schemas/{name}"
_SECURITY_SCHEMES: dict[str, dict[str, Any]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "x-goog-api-key": {"type": "apiKey", "in": "header", "name": "x-goog-api-key"},
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message"],
            "properties": {name: {"type": "string"} for name in ("message", "type", "status")},
        }
    },
}
"""Schema of the part that the errors of all dialects have in common."""


def render_openapi(routes: Iterable[Route]) -> bytes:
    routes = [*routes]
    structs = {route.request for route in routes if route.request}
    ordered = sorted(structs, key=lambda struct: struct.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=SCHEMA_REF_TEMPLATE)
    bodies = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        body = bodies.get(route.request) if route.request else None
        paths.setdefault(route.path, {})[route.method.lower()] = _describe_operation(route, body)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "areal_hpc agent proxy", "version": __version__},
            "paths": paths,
            "components": {
                "schemas": {**components, "Refusal": _ERROR_SCHEMA},
                "securitySchemes": _SECURITY_SCHEMES,
            },
        }
    )


def _describe_operation(route: Route, body: dict[str, Any] | None) -> dict[str, Any]:
    kind = route.json_type if route.answer_content_type == "application/json" else "string"
    answer: dict[str, Any] = {route.answer_content_type: {"schema": {"type": kind}}}
    if route.streams:
        answer["text/event-stream"] = {"schema": {"type": "object", "required": ["data"]}}
    refusal = {"application/json": {"schema": {"$ref": SCHEMA_REF_TEMPLATE.format(name="Refusal")}}}
    operation: dict[str, Any] = {
        "x-opened-by": route.opened_by,
        "responses": {
            "200": {"description": "The answer.", "content": answer},
            "4XX": {"description": "Client error: the request is invalid.", "content": refusal},
            "5XX": {"description": "Server error: try again later.", "content": refusal},
        },
    }
    if route.opened_by != "anyone":
        operation["security"] = [{name: []} for name in _SECURITY_SCHEMES]
    if route.opened_by == "reader":
        operation["security"].append({})  # no key on loopback
    if name := route.path_parameter:
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    if body is not None:
        content = {"application/json": {"schema": body}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
