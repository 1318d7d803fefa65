"""Decoding of JSON and conversion of Python values with msgspec, safe for threads.

msgspec 0.22 examines a type when it is first decoded, and shows other threads the result before it
is complete: a second thread that decodes the type at this moment crashes the process. Here a lock
guards the examination of each type.
"""

import threading
from typing import Any, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")
Json: TypeAlias = bytes | bytearray | memoryview | msgspec.Raw | str

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_lock = threading.Lock()


def decode_json(content: Json, json_type: type[T]) -> T:
    """Decode JSON; raise `msgspec.DecodeError` if it is not JSON of this type."""
    value: T = _get_decoder(json_type).decode(content)
    return value


def convert_value(value: object, value_type: type[T]) -> T:
    """Convert a Python value; raise `msgspec.ValidationError` if it is not one of this type."""
    _get_decoder(value_type)
    return msgspec.convert(value, value_type)


def _get_decoder(json_type: Any) -> msgspec.json.Decoder[Any]:
    decoder = _decoders.get(json_type)
    if decoder is None:
        with _lock:
            decoder = _decoders.setdefault(json_type, msgspec.json.Decoder(json_type))
    return decoder
