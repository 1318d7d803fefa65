"""One real SGLang on CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from areal_hpc.inference.command import build_replica_command
from areal_hpc.inference.sglang_server import build_environment, find_free_ports
from areal_hpc.jobs.environment import get_interpreter
from areal_hpc.recipe.sections.inference import InferenceConfig

START_TIMEOUT_S = 110.0


@contextmanager
def serving(
    model_dir: Path, log_path: Path, *extra_args: str, context_tokens: int = 1024
) -> Iterator[str]:
    """The address of a server of that model, in float32, ready for requests."""
    ports = find_free_ports()
    command = build_replica_command(
        InferenceConfig(dtype="float32", context_length=context_tokens, extra_args=extra_args),
        python=get_interpreter("serve", "auto"),
        model_path=str(model_dir),
        device="cpu",
        index=0,
        ports=ports,
        random_seed=3,
    )
    url = f"http://127.0.0.1:{ports.http}"
    with log_path.open("wb") as log_file:
        process = subprocess.Popen(
            command.argv,
            env=build_environment(str(log_path.parent)) | command.environment,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        )
        try:
            _await_ready(url, process, log_path)
            yield url
        finally:
            if process.poll() is None:
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
