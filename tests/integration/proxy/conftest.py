"""One real SGLang on CPU with a tiny Qwen3, and a real proxy in front of it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from areal_hpc.cluster.submit import interpreter_of
from areal_hpc.inference.command import replica_command
from areal_hpc.inference.config import InferenceConfig
from areal_hpc.inference.server import free_ports
from areal_hpc.tiny_model import make_tiny_model
from tests.contract.proxy.proxy_stage import Stage
from tests.unit.session.chatml import TRAINING_TEXT

VERSION = "1.0"
START_TIMEOUT_S = 110.0


@pytest.fixture(scope="package")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(path, TRAINING_TEXT * 20, seed=5)
    return path


@pytest.fixture(scope="package")
def sglang_url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    ports = free_ports()
    command = replica_command(
        InferenceConfig(
            dtype="float32", context_tokens=1024, extra_args=("--weight-version", VERSION)
        ),
        python=interpreter_of("serve", "auto"),
        model_path=str(model_dir),
        device="cpu",
        index=0,
        ports=ports,
        random_seed=3,
    )
    url = f"http://127.0.0.1:{ports.http}"
    log_path = tmp_path_factory.mktemp("sglang") / "log"
    with Path("/tmp/sglang.lock").open("w") as lock, log_path.open("wb") as log_file:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one SGLang at a time fits the development machine
        process = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.environment},
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        )
        try:
            _await_ready(url, process, log_path)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await_ready(url: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while True:
        assert process.poll() is None, log_path.read_text()
        assert time.monotonic() < give_up_at, log_path.read_text()
        try:
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


@pytest.fixture(scope="package")
def stage(
    model_dir: Path, sglang_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("stage"), model_dir=model_dir, context_tokens=1024)
    stage.route_to(sglang_url)
    yield stage
    stage.close()
