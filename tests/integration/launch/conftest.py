"""Shared finished run that tests look at, and its model, from which other runs start."""

import fcntl
import shutil
from pathlib import Path

import pytest

from tests.support.rank_server import get_folder_of_all_workers
from tests.support.small_run import SmallRun, await_none_left


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """Train the quick start, cut down, to its end once for all workers."""
    run = SmallRun(get_folder_of_all_workers(tmp_path_factory) / "quickstart")
    mark = run.fileroot / "done"
    with (run.fileroot / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not mark.exists():
            run.finish()
            await_none_left(run, 20.0)
            mark.touch()
    return run


@pytest.fixture(scope="session")
def model(finished: SmallRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the SFT stage's model out of the run, whose model a command would take for its own."""
    folder = tmp_path_factory.mktemp("model") / "sft"
    return Path(shutil.copytree(finished.paths.export_dir("sft"), folder))
