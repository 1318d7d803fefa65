"""JSON codec of the values sent between an answer and its tests; imports the standard library only.

Booleans, integers, floats, text and None are encoded as themselves; other literals as lists of a
type name and parts. A value of a subclass is encoded as the base type. Any other object stays in
its process, and is encoded as a number.
"""

import json
import socket
from collections.abc import Callable
from typing import Any

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class BrokenChannelError(Exception):
    """Error for a peer that is gone, or that sent an invalid message."""


def encode(value: Any, get_reference_number: Callable[[Any], int]) -> Any:
    """Encode a value for JSON; an object that is no literal is encoded as its number."""
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return [name, *(encode(item, get_reference_number) for item in value)]
    if isinstance(value, dict):
        return [
            "dict",
            *(
                [encode(k, get_reference_number), encode(v, get_reference_number)]
                for k, v in value.items()
            ),
        ]
    return ["object", get_reference_number(value)]


def decode(data: Any, get_referenced_value: Callable[[int], Any]) -> Any:
    """Decode a value into Python's own types and referenced objects."""
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if not isinstance(data, list) or not data:
        raise BrokenChannelError("the message is no value")
    name, *parts = data
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(part, get_referenced_value) for part in parts)
    if name == "dict":
        return {
            decode(key, get_referenced_value): decode(value, get_referenced_value)
            for key, value in parts
        }
    if name == "bytes":
        return bytes.fromhex(parts[0])
    if name == "complex":
        return complex(*parts)
    if name == "object":
        return get_referenced_value(parts[0])
    raise BrokenChannelError("the message is no value")


class JsonLineSocket:
    """End of the socket between the two: a JSON document on each line, of limited size."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._reader = self._socket.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, or raise BrokenChannelError if the other end is gone."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise BrokenChannelError(str(error)) from error

    def receive(self) -> dict[str, Any]:
        """Receive a message, or raise BrokenChannelError if the peer is gone or sent none."""
        try:
            line = self._reader.readline(MAX_MESSAGE_BYTES)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError) as error:
            raise BrokenChannelError(str(error)) from error
        if not isinstance(message, dict):
            raise BrokenChannelError("the program has ended")
        return message
