"""What clients rely on in HTTP itself: kept connections, leave to send a body, refusals."""

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage


@pytest.fixture
def client(stage: Stage) -> Iterator[socket.socket]:
    """A connection that reads what has come, packet by packet."""
    parts = urlsplit(stage.url)
    assert parts.port is not None
    with socket.create_connection((parts.hostname, parts.port), timeout=scaled(60)) as connection:
        yield connection


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", "host: proxy", *headers, "", ""]).encode() + body


def read_until(client: socket.socket, end: bytes) -> bytes:
    """What has come, up to `end`."""
    received = b""
    while not received.endswith(end):
        block = client.recv(1 << 16)
        assert block, received
        received += block
    return received


def test_a_connection_is_kept_after_an_answer_without_a_body(client: socket.socket) -> None:
    for _ in range(2):
        client.sendall(request("HEAD /healthz"))
        assert read_until(client, b"\r\n\r\n").startswith(b"HTTP/1.1 405 ")
    client.sendall(request("GET /healthz"))
    assert read_until(client, b"}").startswith(b"HTTP/1.1 200 ")


def test_expect_100_continue_is_answered(stage: Stage, key: str, client: socket.socket) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    headers = (
        f"authorization: Bearer {key}",
        "expect: 100-continue",
        f"content-length: {len(body)}",
    )
    client.sendall(request("POST /v1/chat/completions", *headers))
    assert client.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(body)
    assert b"hello world" in read_until(client, b"}}}")


def test_what_is_no_request_is_refused_and_hung_up_on(client: socket.socket) -> None:
    client.sendall(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
    assert client.recv(1) == b""


def test_a_wrong_key_is_refused_before_the_body_is_sent(client: socket.socket) -> None:
    headers = ("authorization: Bearer sk-guess", "content-length: 90000")
    client.sendall(request("POST /v1/chat/completions", *headers))
    assert client.recv(64).startswith(b"HTTP/1.1 401")
