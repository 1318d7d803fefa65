"""Model from which runs start."""

import shutil
from pathlib import Path

import pytest

from tests.support.small_run import SmallRun, await_none_left


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = SmallRun(tmp_path_factory.mktemp("sft") / "runs", "trainer.total_steps=1")
    run.finish()
    await_none_left(run, 20.0)
    return Path(
        shutil.copytree(run.paths.export_dir("sft"), tmp_path_factory.mktemp("model") / "sft")
    )
