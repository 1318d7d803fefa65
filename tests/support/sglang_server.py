"""Server of the real SGLang on CPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_hpc.inference.server.command import build_replica_command
from areal_hpc.inference.server.sglang_server import SGLangServer, choose_server_ports
from areal_hpc.jobs.config import get_interpreter
from areal_hpc.recipe.sections.inference import InferenceConfig
from tests.support.waiting import wait_for

START_TIMEOUT_S = 110.0


@contextmanager
def serving(
    model_dir: Path,
    log_path: Path,
    *extra_args: str,
    context_tokens: int = 1024,
    total_tokens: int | None = None,
) -> Iterator[str]:
    """The address of a server of that model, in float32, ready for requests."""
    ports = choose_server_ports()
    command = build_replica_command(
        InferenceConfig(
            context_length=context_tokens,
            max_total_tokens=total_tokens,
            extra_args=extra_args,
        ),
        python=get_interpreter("serve", "auto"),
        model_path=str(model_dir),
        device="cpu",
        dtype="float32",
        index=0,
        ports=ports,
        random_seed=3,
    )
    server = SGLangServer(command, ports, log_path, started_at=time.monotonic())

    def is_ready() -> bool:
        assert not server.find_death_reason(), server.read_log_tail()
        return server.is_ready()

    try:
        wait_for(is_ready, START_TIMEOUT_S, server.read_log_tail)
        yield server.url
    finally:
        server.kill()
