"""The model that runs start from where SFT is not what is tested."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.support.killed_run import warmed_up_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's model after a short SFT stage, made once for all workers."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if is_worker else base) / "model"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = shared / "found"
        if not found.exists():
            found.symlink_to(warmed_up_model(shared))
    return found.resolve()
