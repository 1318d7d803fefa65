"""What a replica's server tells of itself, scraped from it and from nobody between."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import build_opener, install_opener

import pytest

from areal_hpc.inference.job import read_server_samples
from areal_hpc.wire.replicas import ReplicaView


@contextlib.contextmanager
def serving(body: bytes) -> Iterator[str]:
    """A server on this machine that answers so, to whatever it is asked; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n" + body)

        def log_request(self, *_: object) -> None:
            """Quietly."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def read(url: str) -> list[tuple[str, float, dict[str, str]]]:
    samples = read_server_samples(ReplicaView(1, 1, "serving", url))
    return [(one.name, one.value, dict(one.labels)) for one in samples]


def test_a_sites_proxy_does_not_stand_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(b"of_the_proxy 2\n") as proxy, serving(b"running 3\n") as url:
        monkeypatch.setenv("http_proxy", proxy)
        install_opener(build_opener())  # it knows the proxy; that of earlier calls would not
        try:
            assert read(url) == [("running", 3.0, {"replica": "1"})]
        finally:
            monkeypatch.undo()
            install_opener(build_opener())


@pytest.mark.parametrize("body", [b"running 3\nwaiting many\n", b"running \xff\n"])
def test_an_answer_that_cannot_be_read_is_left_out(body: bytes) -> None:
    with serving(body) as url:
        assert read(url) == []
