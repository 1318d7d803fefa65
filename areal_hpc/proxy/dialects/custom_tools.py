"""Custom tools: an OpenAI tool whose input is a text, as a function that chat templates know."""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from areal_hpc.proxy.dialects.validation import build_function_tool


class CustomFormat(Struct):
    type: Literal["text", "grammar"] = "text"
    syntax: str = ""
    definition: str = ""


def build_custom_tool_schema(
    tool_name: str, description: str | None, input_format: CustomFormat, ignored: set[str]
) -> dict[str, Any]:
    """A function that takes the tool's input; a regular expression holds that to its form.

    The engine has no other grammar inside a call's JSON: the model is told of it in words, and it
    is added to `ignored`.
    """
    text: dict[str, Any] = {"type": "string"}
    if input_format.type == "grammar" and input_format.syntax == "regex":
        text["pattern"] = input_format.definition
    elif input_format.type == "grammar":
        ignored.add("tools[].format")
        told = f"Its input follows this {input_format.syntax} grammar:\n{input_format.definition}"
        description = f"{description}\n{told}" if description else told
    schema = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    return build_function_tool(tool_name, description, schema, "pattern" in text or None)


def encode_custom_input(text: str) -> str:
    return msgspec.json.encode({"input": text}).decode()


def read_custom_input(arguments: str) -> str:
    """Read the input of a custom tool's call; malformed arguments are taken as the input."""
    try:
        given = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = given.get("input") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments
