"""Fixtures that many unit tests need."""

from pathlib import Path

import pytest

from areal_hpc.rundir.paths import RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)
