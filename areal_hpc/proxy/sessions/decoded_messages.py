"""Messages that a request repeats byte by byte, as those of a conversation do from turn to turn.

Decoding all of them again, and comparing each with the tree's, is most of what a late turn costs.
"""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.session.chat_template import Message

MAX_REMEMBERED_BYTES = 1 << 20
"""Of a session. A longer conversation is decoded anew at each turn."""
_HEAD_PATTERN = re.compile(rb'\{(?:"\w+": ?(?:"[^"\\]*"|[\w.-]+), ?)*"messages": ?\[')
"""How SDKs begin the body of a chat request, up to its first message."""


class _RawMessages(msgspec.Struct):
    messages: msgspec.Raw


_raw_decoder = msgspec.json.Decoder(_RawMessages)


class DecodedMessages:
    """The messages of a session's latest request, recognized at the beginning of the next one."""

    def __init__(self) -> None:
        self._head = self._beginning = b""
        """The body up to its first message, and up to the end of the last."""
        self._decoded: list[Any] = []
        self._normal: list[Message] = []
        """The first of these in normal form."""

    def decode_body(self, body: bytes, decode: Callable[[bytes], Any]) -> Any:
        """The request that `decode` makes of a body; of messages known already it is not asked."""
        if self._beginning and body.startswith(self._beginning):
            rest = body[len(self._beginning) :].lstrip()
            shortened = self._head + rest[1:]
            if rest[:1] == b"," and (end := self._find_list_end(shortened)):
                # What is wrong with it is told by its place in the whole.
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
        """The normal form of each message, made once of those that are repeated."""
        known = self._normal if messages is self._decoded else []
        new = [normalize_message(messages[i], i) for i in range(len(known), len(messages))]
        normal = [*known, *new]
        if messages is self._decoded:
            self._normal = normal
        return normal

    def forget(self) -> None:
        self._head = self._beginning = b""
        self._decoded, self._normal = [], []

    def _find_list_end(self, body: bytes) -> int:
        """Where the last message ends; 0 if another list than that behind the head counts."""
        start = len(self._head) - 1
        listed = b""
        with contextlib.suppress(msgspec.DecodeError):
            listed = bytes(_raw_decoder.decode(body).messages)
        is_first = listed and body.startswith(listed, start)  # the key may be given twice
        return start + len(listed[:-1].rstrip()) if is_first else 0

    def _remember(self, request: Any, beginning: bytes) -> None:
        if not 0 < len(beginning) <= MAX_REMEMBERED_BYTES:
            self.forget()
            return
        self._beginning, self._decoded = beginning, request.messages
