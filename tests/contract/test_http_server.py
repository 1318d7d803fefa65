"""The HTTP server of all services hangs up on stalled clients and keeps room for others."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import uvloop
from starlette.requests import Request

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.rendezvous import make_client_tls, make_server_tls
from areal_hpc.wire import http_server
from areal_hpc.wire.http import AsyncWireClient, WireClient
from areal_hpc.wire.http_server import JsonApp, ServiceServer, read_body
from areal_hpc.wire.replicas import ReplicasOfCell
from tests.support.deadlines import scaled
from tests.support.json_server import JsonHandler, serving_http
from tests.support.service_keys import OTHER_SERVICE_KEY, SERVICE_KEY
from tests.support.waiting import read_until

HEAD = b"POST / HTTP/1.1\r\nhost: s\r\ncontent-length: 5\r\n\r\n"


class Echo(JsonApp):
    """Handler that answers with the request's body once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    async def answer(self, request: Request) -> tuple[int, bytes]:
        body = await read_body(request, 100)
        while not self.gate.is_set():
            await asyncio.sleep(0.01)
        return 200, body


LIMIT_S = scaled(0.3)


class Served:
    """Echo service on a port, with deadlines of a fraction of a second."""

    def __init__(
        self,
        app: Echo,
        tls: ssl.SSLContext | None = None,
        make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        self.app = app
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._server = ServiceServer(app, tls)
        self._thread = threading.Thread(target=self._serve, args=(make_loop,))
        self._thread.start()

    def _serve(self, make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(self._server.serve(sockets=[self._listener]))

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.address, timeout=scaled(30))
        connection.sendall(data)
        return connection

    def connect_encrypted(self, data: bytes = b"", key: str = SERVICE_KEY) -> ssl.SSLSocket:
        encrypted = make_client_tls(key).wrap_socket(self.connect())
        encrypted.sendall(data)
        return encrypted

    def stop(self) -> None:
        self.app.gate.set()
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_HEAD_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(http_server, "REQUEST_RECEIVE_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(http_server, "TICKS_PER_DEADLINE_CHECK", 1)
    monkeypatch.setattr("areal_hpc.wire.http_server.get_connection_descriptor_limit", lambda: 4)


@pytest.fixture
def served(short_limits: None) -> Iterator[Served]:
    served = Served(Echo())
    served.app.gate.set()
    yield served
    served.stop()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def encrypted(
    request: pytest.FixtureRequest, short_limits: None, tmp_path: Path
) -> Iterator[Served]:
    """Serve the same echo over TLS."""
    (tmp_path / "services.pem").write_text(SERVICE_KEY)
    served = Served(Echo(), make_server_tls(tmp_path / "services.pem"), request.param)
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
        text = read_until(client, b"the request's %b did not come within %.0f s" % (part, LIMIT_S))
        assert text.startswith(b"HTTP/1.1 408 ")
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


def test_a_full_server_drops_who_never_asked_and_refuses_only_when_all_have(served: Served) -> None:
    served.app.gate.clear()
    with ExitStack() as stack, served.connect() as silent:
        asking = [stack.enter_context(served.connect(HEAD + b"abcde")) for _ in range(4)]
        assert silent.recv(1) == b"", "hung up on"
        with served.connect() as fifth:
            assert fifth.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        served.app.gate.set()
        for client in asking:
            assert read_until(client, b"abcde").startswith(b"HTTP/1.1 200 ")


def test_requests_over_tls_are_answered_in_turn(encrypted: Served) -> None:
    for _ in range(5):
        with encrypted.connect_encrypted(HEAD + b"abcde") as client:
            for body in (b"fghij", b"klmno"):
                assert b" 200 " in read_until(client, b"abcde" if body == b"fghij" else b"fghij")
                client.sendall(HEAD + body)
            assert b" 200 " in read_until(client, b"klmno")


@pytest.mark.parametrize("sent", [b"", b"\x16\x03", HEAD + b"abcde"])
def test_an_unfinished_handshake_is_hung_up_on_unanswered(encrypted: Served, sent: bytes) -> None:
    with encrypted.connect(sent) as client:
        received = b""
        with suppress(ConnectionResetError):
            while block := client.recv(1 << 16):
                received += block
        assert b"HTTP" not in received


def test_half_a_request_over_tls_is_refused_in_time(encrypted: Served) -> None:
    with encrypted.connect_encrypted(HEAD[:9]) as client:
        assert read_until(client, b"within %.0f s" % LIMIT_S).startswith(b"HTTP/1.1 408 ")


def test_a_client_of_another_run_trusts_no_other_certificate(encrypted: Served) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        encrypted.connect_encrypted(key=OTHER_SERVICE_KEY)
    with encrypted.connect_encrypted(HEAD + b"abcde") as client:
        assert b" 200 " in read_until(client, b"abcde")


def test_connections_in_a_handshake_count_and_make_room(encrypted: Served) -> None:
    encrypted.app.gate.clear()
    with ExitStack() as stack, encrypted.connect() as silent:
        asking = [
            stack.enter_context(encrypted.connect_encrypted(HEAD + b"abcde")) for _ in range(4)
        ]
        with suppress(ConnectionResetError):
            assert silent.recv(1) == b"", "hung up on"
        with encrypted.connect() as fifth, suppress(ConnectionResetError):
            assert fifth.recv(1 << 16) == b"", "no room"
        encrypted.app.gate.set()
        for client in asking:
            assert b" 200 " in read_until(client, b"abcde")


EXPECTED = "answered what is no ReplicasOfCell .*process_cpu_seconds"


class _Exporter(JsonHandler):
    """Metrics under any path, as Prometheus' Python library exports them."""

    def get(self) -> None:
        self.answer(200, b"process_cpu_seconds_total 0.1\n")


@pytest.mark.asyncio
async def test_an_answer_that_is_no_reply_says_that_the_service_is_away() -> None:
    with serving_http(_Exporter) as url:
        client = WireClient(url)
        with pytest.raises(ClusterError, match=EXPECTED):
            client.call("/replicas", None, ReplicasOfCell)
        client.close()
        async_client = AsyncWireClient(url)
        with pytest.raises(ClusterError, match=EXPECTED):
            await async_client.call("/replicas", None, ReplicasOfCell)
        await async_client.close()
