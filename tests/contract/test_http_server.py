"""The server of all services: who does not go on is hung up on, and there is room for others."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from starlette.requests import Request

from areal_hpc.wire import http_server
from areal_hpc.wire.asgi import JsonApp, ServiceServer, read_body
from tests.support.deadlines import scaled

HEAD = b"POST / HTTP/1.1\r\nhost: s\r\ncontent-length: 5\r\n\r\n"


def read_until(client: socket.socket, end: bytes) -> bytes:
    """What has come, up to `end`."""
    received = b""
    while not received.endswith(end):
        block = client.recv(1 << 16)
        assert block, received
        received += block
    return received


class Echo(JsonApp):
    """Answers with the body it got, once it may."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    async def answer(self, request: Request) -> tuple[int, bytes]:
        body = await read_body(request, 100, RuntimeError("too large"))
        while not self.gate.is_set():
            await asyncio.sleep(0.01)
        return 200, body


LIMIT_S = scaled(0.3)


class Served:
    """An echo on a port, with deadlines of a fraction of a second."""

    def __init__(self, app: Echo) -> None:
        self.app = app
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._server = ServiceServer(app)
        serve = self._server.serve(sockets=[self._listener])
        self._thread = threading.Thread(target=lambda: asyncio.run(serve))
        self._thread.start()

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.address, timeout=scaled(30))
        connection.sendall(sent)
        return connection

    def stop(self) -> None:
        self.app.gate.set()
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(http_server, "REQUEST_HEAD_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(http_server, "REQUEST_RECEIVE_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(http_server, "TICKS_PER_DEADLINE_CHECK", 1)
    monkeypatch.setattr("areal_hpc.wire.asgi.get_connection_descriptor_limit", lambda: 4)
    served = Served(Echo())
    served.app.gate.set()
    yield served
    served.stop()


@pytest.mark.parametrize(
    ("sent", "part"),
    [(b"", b"head"), (b"POST / HT", b"head"), (HEAD[:-2], b"head"), (HEAD + b"ab", b"body")],
    ids=["nothing", "half a line", "half a head", "half a body"],
)
def test_half_a_request_is_refused_in_time(served: Served, sent: bytes, part: bytes) -> None:
    with served.connect(sent) as client:
        said = read_until(client, b"the request's %b did not come within %.0f s" % (part, LIMIT_S))
        assert said.startswith(b"HTTP/1.1 408 ")
        assert client.recv(1) == b""


def test_half_a_head_on_a_kept_connection_is_refused_in_time(served: Served) -> None:
    with served.connect(HEAD + b"abcde") as client:
        assert read_until(client, b"abcde").startswith(b"HTTP/1.1 200 ")
        client.sendall(HEAD[:9])
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


def test_an_answer_that_takes_long_is_waited_for(served: Served) -> None:
    served.app.gate.clear()
    with served.connect(HEAD + b"abcde") as client:
        threading.Timer(3 * LIMIT_S, served.app.gate.set).start()
        assert read_until(client, b"abcde").startswith(b"HTTP/1.1 200 ")


def test_a_full_server_drops_who_never_asked_and_refuses_only_when_all_have(
    served: Served,
) -> None:
    served.app.gate.clear()
    with ExitStack() as held, served.connect() as silent:
        asking = [held.enter_context(served.connect(HEAD + b"abcde")) for _ in range(4)]
        assert silent.recv(1) == b"", "hung up on"
        with served.connect() as fifth:
            assert fifth.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        served.app.gate.set()
        for client in asking:
            assert read_until(client, b"abcde").startswith(b"HTTP/1.1 200 ")
