"""A busy machine is slow, not wrong: examples have no deadline."""

from pathlib import Path

import pytest
from hypothesis import settings

from areal_hpc.rundir.paths import RunPaths

settings.register_profile("areal_hpc", deadline=None)
settings.load_profile("areal_hpc")


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)
