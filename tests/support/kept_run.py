"""A run directory that an earlier version of areal_hpc left, kept as a file."""

import tarfile
from pathlib import Path

from tests.support.environments import CHECKOUT

KEPT_RUN_FILE = CHECKOUT / "tests" / "golden" / "kept_run.tar.xz"


def unpack_kept_run(folder: Path) -> Path:
    """The run directory of experiment `kept`, trial `run`, below a folder."""
    with tarfile.open(KEPT_RUN_FILE) as archive:
        archive.extractall(folder, filter="data")
    (run,) = folder.glob("*/*/recipe.yaml")
    return run.parent
