"""JSON and Python values as types, from any thread.

msgspec 0.22 examines a type when it is first decoded, and lets other threads see the result before
it is whole: a second thread that decodes the type in this moment crashes the process. Here a lock
stands around the examination of each type.
"""

import threading
from typing import Any, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")
Json: TypeAlias = bytes | bytearray | memoryview | msgspec.Raw | str

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_lock = threading.Lock()


def decode_json(content: Json, json_type: type[T]) -> T:
    """Raise `msgspec.DecodeError` where the content is not JSON of this type."""
    value: T = _get_decoder(json_type).decode(content)
    return value


def convert_value(value: object, wanted: type[T]) -> T:
    """Raise `msgspec.ValidationError` where the value is not one of this type."""
    _get_decoder(wanted)
    return msgspec.convert(value, wanted)


def _get_decoder(json_type: Any) -> msgspec.json.Decoder[Any]:
    decoder = _decoders.get(json_type)
    if decoder is None:
        with _lock:
            decoder = _decoders.setdefault(json_type, msgspec.json.Decoder(json_type))
    return decoder
