"""SGLang's server process: log, compiler caches, sockets, ports, device and metrics."""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.request import build_opener, install_opener

import pytest

from areal_hpc.inference.config import resolve_device
from areal_hpc.inference.job import read_server_samples
from areal_hpc.inference.server import sglang_server
from areal_hpc.inference.server.node_files import build_cache_variables, make_cache_dir
from areal_hpc.inference.server.sglang_main import (
    KEYS_FILE_VARIABLE,
    consume_keys_file,
    write_keys_file,
)
from areal_hpc.inference.server.sglang_server import ServerLogPipe, make_scratch_dir
from areal_hpc.recipe.sections.trainer import Device
from areal_hpc.wire.replicas import ReplicaView
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT, python_of
from tests.support.json_server import JsonHandler, serving_http

TIMEOUT_S = scaled(30.0)
MAX_SOCKET_PATH_CHARS = 107


def speak(log: ServerLogPipe, size_bytes: int) -> None:
    """Write that many bytes to the log as a server does, and end."""
    says = f"import sys; sys.stdout.write('x' * {size_bytes} + 'last words')"
    speaker = subprocess.Popen([sys.executable, "-c", says], stdout=log.write_end)
    log.start_copying()
    assert speaker.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("pieces", [1024, 8], ids=["all is held", "more than is held"])
def test_a_server_does_not_wait_for_the_storage_of_its_log(
    pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe takes 64 KiB and then blocks its writer until somebody reads it."""
    monkeypatch.setattr(sglang_server, "_MAX_HELD_PIECES", pieces)
    path = tmp_path / "server.log"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    speak(ServerLogPipe(path), 1 << 22)
    os.set_blocking(reading, True)
    written = b"".join(iter(lambda: os.read(reading, 1 << 16), b""))
    os.close(reading)
    if pieces > 8:
        assert written == b"x" * (1 << 22) + b"last words"
    else:
        assert len(written) < 1 << 20
        assert b"bytes left out: the storage took none)" in written


def test_last_words_are_in_the_file_behind_those_of_an_earlier_server(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "server.log"
    for words in (b"xlast words", b"xlast wordsxlast words"):
        log = ServerLogPipe(path)
        speak(log, 1)
        log.await_written(TIMEOUT_S)
        assert path.read_bytes() == words


def test_keys_are_hidden_also_in_a_call_whose_arguments_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_keys_file(tmp_path, "abc", "xyz")
    monkeypatch.setenv(KEYS_FILE_VARIABLE, str(path))
    factory = logging.getLogRecordFactory()
    try:
        assert consume_keys_file() == ["--api-key=abc", "--admin-api-key=xyz"]
        assert not path.exists()
        log = logging.getLogger("server")
        log.warning("keys: %s", "abc")
        log.warning("deprecated", FutureWarning, "xyz")  # as transformers does
    finally:
        logging.setLogRecordFactory(factory)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "keys: (hidden)"
    assert second == "deprecated (<class 'FutureWarning'>, '(hidden)')"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("/node/x", "/node/x/jit", "/node/x/inductor")),
        ({"SGLANG_CACHE_DIR": "/site"}, ("/site", "/site/jit", "/site/inductor")),
        ({"TORCHINDUCTOR_CACHE_DIR": "/mine"}, ("/node/x", "/node/x/jit", "/mine")),
    ],
)
def test_a_site_may_set_compiler_caches(environ: dict[str, str], expected: tuple[str, ...]) -> None:
    assert tuple(build_cache_variables(environ, Path("/node/x")).values()) == expected


def test_compiler_caches_must_be_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fallback = tmp_path / "fallback"
    folder = make_cache_dir(fallback)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert make_cache_dir(fallback) == folder != fallback
    folder.chmod(0o777)
    assert make_cache_dir(fallback) == fallback
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert make_cache_dir(fallback) == fallback


@pytest.mark.parametrize("chars", [79, 80, 150])
def test_sockets_fit_however_long_a_path_is(chars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    folder = base / ("x" * (chars - len(str(base)) - 1))
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    made = make_scratch_dir()
    try:
        assert len(made + "/tmp12345678") <= MAX_SOCKET_PATH_CHARS  # as SGLang names one
        assert (Path(made).parent == folder) == (chars <= 79)
    finally:
        shutil.rmtree(made)
        shutil.rmtree(base)


def test_ports_differ_and_stay_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outgoing = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(sglang_server, "_LOCAL_PORT_RANGE_FILE", outgoing)
    outgoing.write_text("20000\t60999\n")
    choices = [sglang_server.choose_server_ports() for _ in range(50)]
    assert all(ports.http != ports.rendezvous for ports in choices)
    assert len({ports.http for ports in choices}) > 25, "cells that start together choose alike"
    assert max(max(ports.http, ports.rendezvous) for ports in choices) < 20000
    outgoing.write_text("1024\t65535\n")  # all ports may be outgoing: any free one will do
    ports = sglang_server.choose_server_ports()
    assert 0 < ports.http != ports.rendezvous > 0


LOOKS = """
import os, socket
from areal_hpc.inference.server.sglang_server import _is_listening
with socket.create_server(("127.0.0.1", 0)) as listener:
    port = listener.getsockname()[1]
    print(_is_listening(os.getpid(), port), _is_listening(os.getpid(), 1))
"""


@pytest.mark.parametrize("environment", ["main", "camel"])
def test_a_server_is_seen_to_listen_from_every_environment(environment: str) -> None:
    looked = (python_of(environment), "-W", "error", "-c", LOOKS)
    probe = subprocess.run(looked, cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
    assert probe.stdout.split() == ["True", "False"], probe.stderr


@pytest.mark.parametrize(
    ("device", "files", "environ", "expected"),
    [
        ("auto", ["nvidia0"], {}, "cuda"),
        ("auto", ["nvidia0"], {"CUDA_VISIBLE_DEVICES": "0"}, "cuda"),
        ("auto", ["nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        ("auto", ["nvidia0"], {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "cpu"),
        ("auto", ["nvidiactl"], {}, "cpu"),
        ("auto", [], {"CUDA_VISIBLE_DEVICES": "0"}, "cpu"),
        ("cpu", ["nvidia0"], {}, "cpu"),
        ("cuda", [], {"CUDA_VISIBLE_DEVICES": ""}, "cuda"),
    ],
)
def test_a_device_that_is_named_is_taken_and_auto_is_the_gpu_where_one_is_there_and_not_hidden(
    device: Device, files: list[str], environ: dict[str, str], expected: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert resolve_device(device, environ, tmp_path) == expected


@contextlib.contextmanager
def serving(body: bytes) -> Iterator[str]:
    """Yield the URL of a local server that answers every request with `body`."""

    class Handler(JsonHandler):
        def get(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n" + body)

    with serving_http(Handler) as url:
        yield url


def read(url: str) -> list[tuple[str, float, dict[str, str]]]:
    samples = read_server_samples(ReplicaView(1, 1, "serving", url))
    return [(sample.name, sample.value, dict(sample.labels)) for sample in samples]


def test_a_sites_proxy_does_not_stand_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(b"of_the_proxy 2\n") as proxy, serving(b"running 3\n") as url:
        monkeypatch.setenv("http_proxy", proxy)
        install_opener(build_opener())  # a new one knows the proxy; one of earlier calls would not
        try:
            assert read(url) == [("running", 3.0, {"replica": "1"})]
        finally:
            monkeypatch.undo()
            install_opener(build_opener())


@pytest.mark.parametrize("body", [b"running 3\nwaiting many\n", b"running \xff\n"])
def test_an_answer_that_cannot_be_read_is_left_out(body: bytes) -> None:
    with serving(body) as url:
        assert read(url) == []
