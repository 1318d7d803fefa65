"""Calls of HTTP services made wrong in every way, from right ones and a seed."""

import contextlib
import http.client
import json
import random
import socket
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from areal_hpc.wire.service_key import make_client_tls
from tests.support.deadlines import scaled
from tests.support.service_keys import DEFECTS, KeyDefect, spoil_authorization

HANG_S = 20.0
"""A call that was not to wait takes milliseconds; one that takes longer hangs."""
LEFT_AFTER_S = 0.3
"""For an answer to a call that may rightly wait: its caller then hangs up."""
NEVER_ANSWERED = "left"
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**70),
    *(-(2**63), -(2**63) - 1, 0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan")),
    *("", " ", "\0", "\ud800", "\U0001f989", "é" * 50, "x" * 5000, "../../etc/passwd", "%s%n{0}"),
    *("9.9", "1.1", "cell-0", "cell-0-000000.h5", "eyJhIjoxfQ==", "/dev/zero"),
    *([], {}, [[]], [None], [0] * 300, {"": ""}, {"a": {"b": [1, 2, {"c": None}]}}),
)
MAX_SWOLLEN_BYTES = 32 * 2**20 - 1024
PLACE, CLOSING = "@place@", (b"]", b"}")
SWOLLEN: tuple[tuple[bytes, bytes, bytes], ...] = (
    *((b"[", b"{},", b"{}]"), (b"[", b"[],", b"[]]"), (b"[", b'"",', b'""]'), (b"[", b"1,", b"1]")),
    *((b"{", b'"%07d":0,', b'"":0}'), (b"{", b'"%07d":null,', b'"":0}'), (b'{"', b"n", b'":1}')),
    *((b"", b"[", b"]"), (b"", b'{"a":[', b"]"), (b"", b"1", b""), (b" ", b" ", b"1")),
    *(
        (b'"', b"word ", b'"'),
        (b'"', b"\\\\", b'"'),
        (b'"', b"\\ud83d", b'"'),
        (b'"', b"{[:,", b'"'),
    ),
    *(
        (b'"', b"\\ud83d\\ude00", b'"'),
        (b'"', b"<|im_end|>", b'"'),
        (b'"', b"\xf0\x9f\x98\x80", b'"'),
    ),
    (b"[", b'{"role":"user","content":""},', b"{}]"),
    (b"[", b'{"type":"text","text":"","sparkle":1},', b"{}]"),
)
"""What a place begins with, what is repeated in it, and what it ends with."""
DEEP = "[" * 3000 + "]" * 3000
ODD_BODIES: tuple[bytes, ...] = (
    *(b"", b" ", b"null", b"[]", b"{}", b'"', b"{", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"\0" * 64),
    *(DEEP.encode(), b'{"a":' * 2000 + b"1" + b"}" * 2000, b"1" * 5000, b'"\\ud800"'),
)
ODD_PATHS = ("/", "//", "{}/", "{}%00", "{}/..", "/{}", "{}?a=b&a=c", "{}#x", "{}/0/1", "/%2e%2e{}")
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW")
ODD_KEYS = ("", "wrong", "x" * 3000, "é", "Bearer", "\t")
ODD_HEADERS = (
    *(("content-length", "-1"), ("content-length", "5, 6"), ("content-length", "99999999999999")),
    *(("content-length", "x"), ("transfer-encoding", "chunked"), ("transfer-encoding", "gzip")),
    *(("upgrade", "websocket"), ("expect", "100-continue"), ("content-type", "text/plain")),
    *(("content-encoding", "gzip"), ("host", ""), ("connection", "close"), ("x-big", "y" * 9000)),
    ("content-type", "application/json; charset=utf-16"),
)
ODD_NUMBERS = ("", "-1", "0", "1", "2", "nan", "inf", "1e308", "9" * 30, "0x1", "1.5", "é")


@dataclass(frozen=True)
class Call:
    """A right call."""

    service: str
    method: str
    path: str
    body: Any = None
    key: str = ""
    is_internal: bool = False
    """The key is one of the run's own processes, no session's."""
    headers: tuple[tuple[str, str], ...] = ()
    """Beside that of the key; their values may be made wrong, too."""

    @property
    def route(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class RawCall:
    """What is sent."""

    call: Call
    """What it was made from."""
    method: str
    path: str
    content: bytes
    headers: tuple[tuple[str, str], ...]
    may_wait: bool
    """It asks to be kept, or announces more than it sends."""
    key_defect: KeyDefect = "none"


@dataclass
class Mutator:
    """Makes calls wrong; the same seed makes the same ones wrong alike."""

    chance: random.Random
    keys_of_run: Sequence[str] = ()
    """Of all services; each opens its own alone."""
    sound_share: float = 0.1
    """Of calls that are left as they are."""
    known: list[Any] = field(default_factory=list)
    """Values of this run (ticket references, session ids, names) that odd places may get."""

    def mutate(self, call: Call) -> RawCall:
        """One call, wrong in one way or in several."""
        if self.chance.random() < self.sound_share:
            return self._encode(call, call.body)
        if call.is_internal and self._is_seldom():
            return self._spoil_key(call)
        how = self.chance.choices(
            (self._spoil_values, self._spoil_bytes, self._spoil_request), (70, 15, 15)
        )[0]
        return how(call)

    def swell(self, call: Call) -> RawCall:
        """A call with a great many of one thing in one place, of 64 KiB to 32 MiB in all."""
        root = {"": json.loads(json.dumps(call.body))}
        holder: Any = root
        place: Any = ""
        while isinstance(inner := holder[place], dict | list) and inner and not self._is_seldom():
            chosen = self.chance.choice([*inner] if isinstance(inner, dict) else range(len(inner)))
            holder, place = inner, chosen
        holder[place] = PLACE
        content = json.dumps(root[""]).encode()
        begin, unit, end = self.chance.choice(SWOLLEN)
        count = int(MAX_SWOLLEN_BYTES * 2 ** -self.chance.uniform(0, 9)) // (len(unit) + 2)
        members = b'"%07d":' in unit
        swollen = b"".join(unit % i for i in range(count)) if members else unit * count
        end = end * count if end in CLOSING else end
        content = content.replace(b'"' + PLACE.encode() + b'"', begin + swollen + end, 1)
        return replace(self._encode(call, call.body), content=content[:MAX_SWOLLEN_BYTES])

    def _spoil_key(self, call: Call) -> RawCall:
        """Of a right call, or of one with wrong values: nobody may come to look at them."""
        is_right = self.chance.random() < 0.5
        raw = self._encode(call, call.body) if is_right else self._spoil_values(call)
        over_tls = call.service != "proxy"
        defect = self.chance.choice(DEFECTS if over_tls else DEFECTS[:-1])
        key = spoil_authorization(call.key, defect, self.chance, self.keys_of_run)
        headers = [one for one in raw.headers if one[0] != "authorization"]
        headers += [] if key is None else [("authorization", key)]
        return replace(raw, headers=tuple(headers), key_defect=defect)

    def _spoil_values(self, call: Call) -> RawCall:
        body = json.loads(json.dumps(call.body))
        for _ in range(self.chance.choice((1, 1, 1, 2, 4))):
            body = self._spoil_one(body)
        headers = tuple(
            (name, self.chance.choice(ODD_NUMBERS) if self.chance.random() < 0.2 else value)
            for name, value in call.headers
        )
        return self._encode(replace(call, headers=headers), body)

    def _spoil_one(self, value: Any) -> Any:
        """The value with one place in it made odd."""
        inner: Sequence[Any] = ()
        if isinstance(value, dict):
            inner = [*value]
        elif isinstance(value, list):
            inner = range(len(value))
        if inner and self.chance.random() < 0.9:
            place = self.chance.choice(inner)
            match self.chance.randrange(10):
                case 0:
                    del value[place]
                case 1 if isinstance(value, dict):
                    value[self.chance.choice(("extra", "", "\0", str(place) * 50))] = deepcopy(
                        value[place]
                    )
                case 1:
                    value += [deepcopy(value[place])] * self.chance.choice((1, 2, 500))
                case _:
                    value[place] = self._spoil_one(value[place])
            return value
        odd = self.known if self.known and self._is_seldom() else ODD_VALUES
        return deepcopy(self.chance.choice(odd))

    def _spoil_bytes(self, call: Call) -> RawCall:
        content = bytearray(json.dumps(call.body).encode())
        match self.chance.randrange(4):
            case 0:
                content = bytearray(self.chance.choice(ODD_BODIES))
            case 1:
                del content[self.chance.randrange(len(content)) :]
            case 2:
                content[self.chance.randrange(len(content))] = self.chance.randrange(256)
            case _:
                content = bytearray(self.chance.randbytes(self.chance.choice((1, 100, 5000))))
        return replace(self._encode(call, call.body), content=bytes(content))

    def _spoil_request(self, call: Call) -> RawCall:
        raw = self._encode(call, call.body)
        match self.chance.randrange(4):
            case 0:
                return replace(raw, method=self.chance.choice(METHODS))
            case 1:
                return replace(raw, path=self.chance.choice(ODD_PATHS).format(call.path))
            case 2:
                return self._encode(replace(call, key=self.chance.choice(ODD_KEYS)), call.body)
            case _:
                odd = self.chance.choice(ODD_HEADERS)
                return replace(raw, headers=(*raw.headers, odd), may_wait=True)

    def _is_seldom(self) -> bool:
        return self.chance.random() < 0.3

    def _encode(self, call: Call, body: Any) -> RawCall:
        key = (("authorization", f"Bearer {call.key}"),) if call.key else ()
        content = b"" if call.method == "GET" else json.dumps(body).encode()
        headers = (*key, *call.headers)
        waits = isinstance(call.body, dict) and "wait_s" in call.body
        return RawCall(call, call.method, call.path, content, headers, may_wait=waits)


class Sender:
    """Sends raw calls to one service, one after another."""

    def __init__(self, url: str, service_key: str) -> None:
        self._address = urlsplit(url)
        self._tls = make_client_tls(service_key) if self._address.scheme == "https" else None

    def send(self, raw: RawCall, before_last_byte: Callable[[], None] = lambda: None) -> str:
        """The status of the answer, or how the call ended without one.

        Raises:
            TimeoutError: The service hangs.
            ConnectionError: It refused the connection: it is dead, or takes no more.
        """
        sent = self._encode(raw)
        host, port = self._address.hostname, self._address.port
        with contextlib.ExitStack() as ends:
            connection: socket.socket = ends.enter_context(
                socket.create_connection((host or "", port or 0), scaled(HANG_S))
            )
            if self._tls is not None and raw.key_defect != "over plain HTTP":
                connection = ends.enter_context(self._tls.wrap_socket(connection))
            connection.settimeout(LEFT_AFTER_S if raw.may_wait else scaled(HANG_S))
            try:
                connection.sendall(sent[:-1])
                before_last_byte()
                connection.sendall(sent[-1:])
                answer = http.client.HTTPResponse(connection, method=raw.method)
                answer.begin()
                answer.read()
            except TimeoutError:
                if raw.may_wait:
                    return NEVER_ANSWERED
                raise
            except (http.client.HTTPException, ConnectionError):
                return "closed"  # what is no HTTP gets no answer
            return str(answer.status)

    def _encode(self, raw: RawCall) -> bytes:
        headers = [("host", self._address.netloc), *raw.headers]
        if not any(name in ("content-length", "transfer-encoding") for name, _ in headers):
            headers.append(("content-length", str(len(raw.content))))
        lines = [
            f"{raw.method} {raw.path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers),
        ]
        return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + raw.content
