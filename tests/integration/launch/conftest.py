"""The run that tests look at, and the model of it that other runs start from."""

import fcntl
import shutil
from pathlib import Path

import pytest

from tests.support.rank_server import get_folder_of_all_workers
from tests.support.small_run import SmallRun, await_none_left


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """The quick start, cut down, trained to its end once for all workers."""
    run = SmallRun(get_folder_of_all_workers(tmp_path_factory) / "quickstart")
    done = run.fileroot / "done"
    with (run.fileroot / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            run.finish()
            await_none_left(run, 20.0)
            done.touch()
    return run


@pytest.fixture(scope="session")
def model(finished: SmallRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the SFT stage made; elsewhere, as commands that name that run are taken for its own."""
    place = tmp_path_factory.mktemp("model") / "sft"
    return Path(shutil.copytree(finished.paths.export_dir("sft"), place))
