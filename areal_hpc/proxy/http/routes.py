"""Route table of the proxy and its OpenAPI description."""

import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from areal_hpc import __version__
from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.streaming import ReplyStream
from areal_hpc.proxy.dialects.dialect import Exchange, FormatError
from areal_hpc.proxy.dialects.openai import format as openai_format

_VERSION_PATTERN = re.compile(r"^/v1[a-z]*(?=/)")
RouteResult = bytes | msgspec.Struct | tuple[Exchange, ReplyStream]
"""The answer's body, or what is encoded to it; or a reply that is streamed."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    """The last part may be a `{name}`: anything but empty. What follows that, as in
    `{name}:countTokens`, ends the path; with it, or in `{name...}`, a name may have slashes."""
    opened_by: Literal["admin", "session", "control", "anyone"]
    """Key that opens it, checked before the request's body is read. `session`: that of an agent;
    `control`: that of who opened the session, which may be the same."""
    answer: Callable[..., RouteResult | Coroutine[Any, Any, RouteResult]]
    """Takes the session that the key opened, if one did; then the name that the path ends with, or
    the request, if there is one."""
    request: type[msgspec.Struct] | None = None
    """What the body holds; None: it is not read. Where there is one, the name is not asked for."""
    rewrite: Callable[[bytes], bytes] | None = None
    """Makes the body that is decoded of the one that was sent."""
    takes_query: bool = False
    """The answer takes the parameters behind the path, too, after the session."""
    refused: FormatError = openai_format.format_error
    """The body of an error."""
    form: str = "application/json"
    """Content type of the answer."""
    json_type: Literal["object", "array"] = "object"
    """What the answer is if it is JSON."""
    streams: bool = False
    """It may answer with server-sent events."""
    when_ended: bool = False
    """Also for a session that has ended."""
    ignores_unknown: bool = False
    """Parameters that the request does not declare may be left out of it, and counted."""
    for_recording: bool = False
    """Only for a session whose client records its own calls."""

    @property
    def path_parameter(self) -> str:
        """What the last part of the path names; empty if it is a part like any other."""
        last = self.path.rpartition("/")[2]
        return last[1:].partition("}")[0].removesuffix("...") if last.startswith("{") else ""

    @property
    def described_path(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace("...}", "}")

    @property
    def label(self) -> str:
        """The path without the version of an API that it may begin with."""
        return _VERSION_PATTERN.sub("", self.path)


class Routes:
    """All routes of one kind of client, found by their paths."""

    def __init__(
        self, routes: Iterable[Route], refused: FormatError = openai_format.format_error
    ) -> None:
        self.refused = refused
        """The body of an error where there is no route."""
        self._by_path: dict[str, dict[str, Route]] = {}
        self._named: dict[str, dict[str, Route]] = {}
        """By what comes before the name."""
        self._with_slashes: dict[tuple[str, str], dict[str, Route]] = {}
        """By what comes before a name that may have slashes, and what after it."""
        for route in routes:
            head, _, last = route.path.rpartition("/")
            end = last.rpartition("}")[2]
            if route.path_parameter and (end or last.endswith("...}")):
                self._with_slashes.setdefault((f"{head}/", end), {})[route.method] = route
            elif route.path_parameter:
                self._named.setdefault(head, {})[route.method] = route
            else:
                self._by_path.setdefault(route.path, {})[route.method] = route

    def __iter__(self) -> Iterator[Route]:
        for named in (self._by_path, self._named, self._with_slashes):
            for methods in named.values():
                yield from methods.values()

    def find_routes(self, path: str) -> tuple[Mapping[str, Route], str]:
        """The routes of a path by their methods, and the name that it ends with, or nothing.

        Raises:
            ProxyRequestError: 404, there is none.
        """
        methods = self._by_path.get(path)
        if methods is not None:
            return methods, ""
        head, _, name = path.rpartition("/")
        if name and head in self._named:
            return self._named[head], name
        found = [
            (methods, path[len(begin) : len(path) - len(end)])
            for (begin, end), methods in self._with_slashes.items()
            if path.startswith(begin) and path.endswith(end) and len(path) > len(begin) + len(end)
        ]
        if not found:
            raise ProxyRequestError(404, f"there is no route {path}")
        return min(found, key=lambda one: len(one[1]))  # an end that is known is no part of a name


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
"""Headers and status that all dialects' errors share."""


def render_openapi(routes: Iterable[Route]) -> bytes:
    """The routes as an OpenAPI document, JSON."""
    routes = [*routes]
    structs = {one.request for one in routes if one.request}
    ordered = sorted(structs, key=lambda one: one.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=SCHEMA_REF_TEMPLATE)
    bodies = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        body = bodies.get(route.request) if route.request else None
        methods = paths.setdefault(route.described_path, {})
        methods[route.method.lower()] = _describe_operation(route, body)
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
    kind = route.json_type if route.form == "application/json" else "string"
    answer: dict[str, Any] = {route.form: {"schema": {"type": kind}}}
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
    if name := route.path_parameter:
        place = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [place]
    if body is not None:
        content = {"application/json": {"schema": body}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
