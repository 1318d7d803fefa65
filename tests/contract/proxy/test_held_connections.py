"""Clients may rely on HTTP, and clients that hold connections cost other clients nothing."""

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.waiting import read_until

FEW_DESCRIPTORS = 200


@pytest.fixture
def tight_stage(tmp_path: Path) -> Iterator[Stage]:
    """Start a proxy that may open few files."""
    with contextlib.closing(Stage(tmp_path, max_open_files=FEW_DESCRIPTORS)) as stage:
        yield stage


def connect(stage: Stage, data: bytes = b"") -> socket.socket:
    parts = urlsplit(stage.url)
    connection = socket.create_connection(
        (str(parts.hostname), parts.port or 0), timeout=scaled(60)
    )
    connection.sendall(data)
    return connection


def test_idle_connections_are_dropped_where_descriptors_run_out(tight_stage: Stage) -> None:
    stage = tight_stage
    with contextlib.ExitStack() as connections:
        for _ in range(FEW_DESCRIPTORS * 3 // 2):
            connections.enter_context(connect(stage))
        _, key = stage.open_session()
        assert stage.ask(key, "hi").status_code == 200
        polls = stage.relay.polls
        time.sleep(2.5)
        assert stage.relay.polls > polls, "it still looks for replicas"
        assert stage.ask(key, "again").status_code == 200
        assert psutil.Process(stage.pid).num_fds() < FEW_DESCRIPTORS


def test_endless_headers_are_refused(stage: Stage) -> None:
    with connect(stage, b"GET /healthz HTTP/1.1\r\nx: ") as client:
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                client.sendall(b"y" * 8192)
                time.sleep(0.001)
        assert b" 431 " in client.recv(1 << 16)


def test_one_session_cannot_fill_the_memory_with_endless_bodies(stage: Stage, key: str) -> None:
    """The largest allowed body has 100,000 bytes here."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: p\r\nauthorization: Bearer {key}\r\n"
    data = f"{head}content-length: 99000\r\n\r\n".encode() + b" " * 90_000
    with contextlib.ExitStack() as connections:
        for _ in range(2):
            connections.enter_context(connect(stage, data))
        stage.catch_up()
        with connect(stage, data) as third:
            assert third.recv(1 << 16).startswith(b"HTTP/1.1 429 ")
        _, other_key = stage.open_session()
        assert stage.ask(other_key, "hi").status_code == 200
    stage.catch_up()
    assert stage.ask(key, "hi").status_code == 200


def test_a_text_that_no_context_holds_is_not_tokenized(stage: Stage, key: str) -> None:
    """No text of 99,000 characters fits into 2,048 tokens."""
    for route, key_at_fault in (("/tokenize", "prompt"), ("/completions", "prompt")):
        answer = stage.post(route, {"prompt": "x" * 99_000}, key)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", key_at_fault)
        assert "3093 tokens" in error["message"]
    answer = stage.post("/detokenize", {"tokens": [5] * 2049}, key)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


@pytest.fixture
def client(stage: Stage) -> Iterator[socket.socket]:
    """Connection that reads the arrived data, packet by packet."""
    parts = urlsplit(stage.url)
    assert parts.port is not None
    with socket.create_connection((parts.hostname, parts.port), timeout=scaled(60)) as connection:
        yield connection


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", "host: proxy", *headers, "", ""]).encode() + body


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
