"""Clients that hold on to connections, headers and bodies cost themselves, and nobody else."""

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

FEW_DESCRIPTORS = 200


@pytest.fixture
def tight_stage(tmp_path: Path) -> Iterator[Stage]:
    """A proxy that may open few files."""
    with contextlib.closing(Stage(tmp_path, max_open_files=FEW_DESCRIPTORS)) as stage:
        yield stage


def connect(stage: Stage, sent: bytes = b"") -> socket.socket:
    parts = urlsplit(stage.url)
    connection = socket.create_connection(
        (str(parts.hostname), parts.port or 0), timeout=scaled(60)
    )
    connection.sendall(sent)
    return connection


def test_idle_connections_beyond_the_descriptors_are_dropped_and_calls_answered(
    tight_stage: Stage,
) -> None:
    stage = tight_stage
    with contextlib.ExitStack() as held:
        for _ in range(FEW_DESCRIPTORS * 3 // 2):
            held.enter_context(connect(stage))
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


def test_one_session_cannot_fill_the_memory_with_bodies_that_do_not_end(
    stage: Stage, key: str
) -> None:
    """The largest body has 100,000 bytes here."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: p\r\nauthorization: Bearer {key}\r\n"
    sent = f"{head}content-length: 99000\r\n\r\n".encode() + b" " * 90_000
    with contextlib.ExitStack() as held:
        for _ in range(2):
            held.enter_context(connect(stage, sent))
        stage.catch_up()
        with connect(stage, sent) as third:
            assert third.recv(1 << 16).startswith(b"HTTP/1.1 429 ")
        _, other_key = stage.open_session()
        assert stage.ask(other_key, "hi").status_code == 200
    stage.catch_up()
    assert stage.ask(key, "hi").status_code == 200


def test_a_text_that_no_context_holds_is_not_tokenized(stage: Stage, key: str) -> None:
    """2,048 tokens are fewer than a text of 99,000 characters could be at best."""
    for route, key_at_fault in (("/tokenize", "prompt"), ("/completions", "prompt")):
        answer = stage.post(route, {"prompt": "x" * 99_000}, key)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", key_at_fault)
        assert "3093 tokens" in error["message"]
    answer = stage.post("/detokenize", {"tokens": [5] * 2049}, key)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
