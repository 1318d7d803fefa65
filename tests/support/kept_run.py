"""A run directory that an earlier version of areal_hpc left, kept as a file."""

import tarfile
from pathlib import Path
from typing import Any

from tests.support.environments import CHECKOUT

KEPT_RUN_FILE = CHECKOUT / "tests" / "golden" / "kept_run.tar.xz"


def unpack_archive(file: Path, folder: Path) -> None:
    """Unpack one of our own archives. Python 3.11 before .4 knows no filter."""
    options: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(file) as archive:
        archive.extractall(folder, **options)


def unpack_kept_run(folder: Path) -> Path:
    """The run directory of experiment `kept`, trial `run`, below a folder."""
    unpack_archive(KEPT_RUN_FILE, folder)
    (run,) = folder.glob("*/*/recipe.yaml")
    return run.parent
