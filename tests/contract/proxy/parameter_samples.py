"""Sample requests for the parameters of each dialect, by the proxy's treatment of each."""

from collections.abc import Mapping
from typing import Any

from tests.contract.proxy.talk import LEAST

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
"""A function in the form of Responses."""
CHAT_ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
"""The same function in the form of Messages."""

HINTS: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "enable_thinking": False,
        "prediction": {"type": "content", "content": "7"},
        "reasoning.effort": "low",
        "service_tier": "auto",
        "sparkle": {"a": 1},
        "store": True,
        "tools[web_search_2030]": {"type": "web_search_2030"},
    },
    "/completions": {"sparkle": {"a": 1}},
    "/messages": {
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "output_config.effort": "max",
        "output_config.sparkle": 1,
        "service_tier": "auto",
        "thinking.display": "omitted",
        "tools[].defer_loading": True,
        "tools[web_fetch_20300101]": {"type": "web_fetch_20300101", "name": "web_fetch"},
    },
    "/responses": {
        "include": ["reasoning.encrypted_content"],
        "reasoning.summary": "detailed",
        "sparkle": {"a": 1},
        "text.verbosity": "high",
        "tools[].sparkle": 1,
        "tools[image_generation]": {"type": "image_generation"},
        "truncation": "auto",
    },
}
"""Parameters without effect, at least here: of the table, of the next release, of hosted tools."""
REFUSED: dict[str, dict[str, Any]] = {
    "/chat/completions": {"echo": True, "num_beams": 4, "web_search_options": {"user_location": 1}},
    "/completions": {"add_special_tokens": False, "bad_words": ["a"], "tools": [CHAT_ADD]},
    "/messages": {"container": "c", "json_schema": SCHEMA, "n": 2},
    "/responses": {"background": True, "do_sample": False, "seed": 1},
}


def body_with(route: str, name: str, value: Any) -> dict[str, Any]:
    """Return a request with one more parameter at its place."""
    outer, _, inner = name.partition(".")
    if not outer.startswith("tools["):
        return {**LEAST[route], outer: {inner: value} if inner else value}
    tool = _get_tool(route)
    tools = [{**tool, inner: value}] if inner else [tool, value]
    return {**LEAST[route], **with_tool(route, *tools)}


def body_without(route: str, name: str) -> dict[str, Any]:
    more = with_tool(route, _get_tool(route)) if name.startswith("tools[") else {}
    return {**LEAST[route], **more}


def _get_tool(route: str) -> dict[str, Any]:
    return {"/messages": TOOL, "/responses": ADD}.get(route, CHAT_ADD)


def with_tool(route: str, *tools: Mapping[str, Any]) -> dict[str, Any]:
    """Add tools that may not be called: this model has no tool-call parser."""
    return {"tools": tools, "tool_choice": {"type": "none"} if route == "/messages" else "none"}
