"""Reading only what is new in a request that repeats the conversation so far.

An agent sends its whole history with every call. Where the bytes of a request begin like those of
the session's last one, up to the end of that one's last message, the messages up to there are known
and need not be decoded, checked and brought into normal form again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from areal_hpc.session.template import Message

KEY = b'"messages"'


class _Messages(msgspec.Struct):
    messages: msgspec.Raw


_decoder = msgspec.json.Decoder(_Messages)


class KnownMessages:
    """The messages of a session's last request, and the bytes in which they came."""

    __slots__ = ("_beginning", "_head", "_messages")

    def __init__(self) -> None:
        self._beginning = b""
        """The body up to the end of its last message."""
        self._head = b""
        """The body up to the beginning of its first message."""
        self._messages: Sequence[Message] = ()

    def cut(self, body: bytes) -> tuple[bytes, Sequence[Message]]:
        """The body without the messages that are known, and those."""
        known_bytes = len(self._beginning)
        if (
            not known_bytes
            or not body.startswith(self._beginning)
            or body[known_bytes : known_bytes + 1] != b","
            or body.find(KEY, known_bytes) >= 0  # the last of two lists would count
        ):
            return body, ()
        return self._head + body[known_bytes + 1 :], self._messages

    def keep(self, body: bytes, cut: bytes, messages: Sequence[Message]) -> None:
        """Remember a request that could be read.

        Args:
            body: As received.
            cut: What `cut` made of it.
            messages: All of its messages.
        """
        listed = bytes(_decoder.decode(cut).messages)
        if cut is body:
            start = body.find(listed)
            if not body[:start].endswith((KEY + b":", KEY + b": ")):
                self._beginning = b""
                return
            self._head = body[: start + 1]
        else:
            start = len(self._head) - 1
        rest_bytes = len(cut) - start - len(listed)
        self._beginning = body[: len(body) - rest_bytes - 1].rstrip()
        self._messages = messages
