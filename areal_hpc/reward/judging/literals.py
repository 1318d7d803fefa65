"""Codec of the values that cross between an answer and its tests, as JSON; standard library only.

Booleans, integers, floats, text and None are themselves; the rest are lists of a letter and parts.
A subclass of one of these types crosses as that type. Any other object stays where it is, and a
number for it crosses.
"""

import json
import socket
from collections.abc import Callable
from typing import Any

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class BrokenChannelError(Exception):
    """The other end is gone, or sent what it may not."""


def encode(value: Any, get_reference_number: Callable[[Any], int]) -> Any:
    """A value as JSON can hold it; an object that is no literal goes as its number."""
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
            return [name, *(encode(one, get_reference_number) for one in value)]
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
    """The value that was encoded, made of Python's own types and of the objects of numbers."""
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if not isinstance(data, list) or not data:
        raise BrokenChannelError("what was sent is no value")
    name, *parts = data
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(one, get_referenced_value) for one in parts)
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
    raise BrokenChannelError("what was sent is no value")


class JsonLineSocket:
    """One end of the socket between the two: a JSON document on each line, of limited size."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._reader = self._socket.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        """Raises BrokenChannelError: the other end is gone."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise BrokenChannelError(str(error)) from error

    def receive(self) -> dict[str, Any]:
        """Raises BrokenChannelError: the other end is gone, or what it sent is no message."""
        try:
            line = self._reader.readline(MAX_MESSAGE_BYTES)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError) as error:
            raise BrokenChannelError(str(error)) from error
        if not isinstance(message, dict):
            raise BrokenChannelError("the program has ended")
        return message
