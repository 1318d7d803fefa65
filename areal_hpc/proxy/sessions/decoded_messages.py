"""Cache of the decoded messages of a session's latest request, which the next one may repeat.

Decoding all of them again, and comparing each with the tree's, is most of the cost of a late turn.
"""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.session.chat_template import Message

MAX_REMEMBERED_BYTES = 1 << 20
"""Limit per session. A longer conversation is decoded anew at each turn."""
_HEAD_PATTERN = re.compile(rb'\{(?:"\w+": ?(?:"[^"\\]*"|[\w.-]+), ?)*"messages": ?\[')
"""Beginning of a chat request's body, as SDKs write it, up to the first message."""


class _RawMessages(msgspec.Struct):
    messages: msgspec.Raw


_raw_decoder = msgspec.json.Decoder(_RawMessages)


class DecodedMessages:
    """Cache of one session: the bytes of the messages, and their decoded and normal forms."""

    def __init__(self) -> None:
        self._head = self._beginning = b""
        """Body up to its first message, and up to the end of the last."""
        self._decoded: list[Any] = []
        self._normal: list[Message] = []
        """Normal form of the first of these."""

    def decode_body(self, body: bytes, decode: Callable[[bytes], Any]) -> Any:
        """Decode a body with `decode`, without the messages at its beginning that are cached."""
        if self._beginning and body.startswith(self._beginning):
            rest = body[len(self._beginning) :].lstrip()
            shortened = self._head + rest[1:]
            if rest[:1] == b"," and (end := self._find_list_end(shortened)):
                # An error must name the position in the whole body, so it is decoded again below.
                with contextlib.suppress(ProxyRequestError):
                    request = decode(shortened)
                    request.messages[:0] = self._decoded
                    self._remember(request, body[: end + len(body) - len(shortened)])
                    return request
        self.forget()
        request = decode(body)
        if head := _HEAD_PATTERN.match(body):
            self._head = head[0]
            self._remember(request, body[: self._find_list_end(body)])
        return request

    def normalize(
        self, messages: list[Any], normalize_message: Callable[[Any, int], Message]
    ) -> list[Message]:
        """Return the normal form of each message, with cached ones of repeated messages."""
        cached = self._normal if messages is self._decoded else []
        new = [normalize_message(messages[i], i) for i in range(len(cached), len(messages))]
        normal = [*cached, *new]
        if messages is self._decoded:
            self._normal = normal
        return normal

    def forget(self) -> None:
        self._head = self._beginning = b""
        self._decoded, self._normal = [], []

    def _find_list_end(self, body: bytes) -> int:
        """Return the end of the last message; 0 if the list after the head is not the valid one."""
        start = len(self._head) - 1
        messages = b""
        with contextlib.suppress(msgspec.DecodeError):
            messages = bytes(_raw_decoder.decode(body).messages)
        is_first = messages and body.startswith(messages, start)  # the body may have the key twice
        return start + len(messages[:-1].rstrip()) if is_first else 0

    def _remember(self, request: Any, beginning: bytes) -> None:
        if not 0 < len(beginning) <= MAX_REMEMBERED_BYTES:
            self.forget()
            return
        self._beginning, self._decoded = beginning, request.messages
