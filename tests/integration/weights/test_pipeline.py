"""The sender's pipeline, against a relay that takes its part in the group but has no model."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from areal_hpc.rundir import rendezvous
from areal_hpc.weights.publisher import Publisher
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.environments import CHECKOUT
from tests.support.waiting import wait_for
from tests.support.weight_updates import (
    await_outdated,
    publish,
    publishing,
    raise_if_failed,
    specs_of,
)

BUCKET_BYTES = 4096
WEIGHTS = {f"norm.{at}.weight": torch.ones(BUCKET_BYTES // 4) for at in range(6)}
"""Each fills a bucket."""


@contextmanager
def scripted_relay(directory: Path, *arguments: str) -> Iterator[None]:
    module = "tests.integration.trainer.scripted_relay"
    command = [sys.executable, "-m", module, "cell-0", str(directory), *arguments]
    process = subprocess.Popen(command, cwd=CHECKOUT)
    try:
        rendezvous.await_endpoint(directory, "control-cell-0", 60)
        yield
    finally:
        process.kill()
        process.wait()


def trainer(directory: Path, update_timeout_s: float) -> AbstractContextManager[Publisher]:
    return publishing(
        directory,
        bucket_bytes=BUCKET_BYTES,
        update_timeout_s=update_timeout_s,
        verify_checksum=False,
    )


def test_the_next_bucket_is_gathered_and_called_for_while_one_is_loaded_and_no_third_is_held(
    tmp_path: Path,
) -> None:
    held = tmp_path / "held"
    held.mkdir()

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for at, parameter in enumerate(WEIGHTS.items()):
            if at > 1:
                assert (held / f"called-{at - 1}").exists(), "two buckets at most at a time"
            yield parameter

    def let_go() -> None:
        for number in range(1, len(WEIGHTS)):
            wait_for((held / f"called-{number + 1}").exists, every_s=0.01)
            (held / f"go-{number}").touch()  # it was being loaded all the while

    with scripted_relay(tmp_path, "0", str(held)), trainer(tmp_path, 15) as publisher:
        version = WeightVersion(1, 0)
        replicas = await_outdated(publisher, version)
        assert len(replicas) == 1
        threading.Thread(target=let_go, daemon=True).start()
        raise_if_failed(publisher.publish(version, specs_of(WEIGHTS), gathered(), replicas))
        assert publisher.outdated(version) == []


def test_who_was_missing_is_named_with_rank_and_deadline(tmp_path: Path) -> None:
    with scripted_relay(tmp_path, "6"), trainer(tmp_path, 2.0) as publisher:
        version = WeightVersion(1, 0)
        ((key, error),) = publish(publisher, version, WEIGHTS).failed.items()
    message = str(error)
    assert f"rank 1: {key}" in message
    assert "within 2 s" in message
