"""Readers of a run directory while the run works, and of run directories in archives."""

import tarfile
from pathlib import Path
from typing import Any

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.environments import CHECKOUT

KEPT_RUN_FILE = CHECKOUT / "tests" / "golden" / "kept_run.tar.xz"


def events_of(paths: RunPaths, name: str, since: float = 0.0) -> list[dict[str, Any]]:
    """Read the events of one name after a time, in order."""
    rows = read_readable_records(paths.events)
    return [row for row in rows if row["event"] == name and row["time"] > since]


def published_weights(
    paths: RunPaths, since: float = 0.0
) -> list[tuple[float, WeightVersion, int]]:
    """List publications: time, version and number of replicas."""
    return [
        (row["time"], WeightVersion.parse(row["version"]), row["replicas"])
        for row in events_of(paths, "weights_published", since)
        if row["replicas"]
    ]


def trained_steps(paths: RunPaths) -> int:
    """Read the last trained step, -1 before the first one."""
    rows = read_readable_records(paths.metrics)
    return int(rows[-1]["step"]) if rows else -1


def logs_of(paths: RunPaths) -> str:
    logs = sorted(paths.logs_dir.glob("latest/*/*.log"))
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


def list_files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of change of a folder and of everything below it, links not followed."""
    statuses = ((path, path.lstat()) for path in (folder, *folder.rglob("*")))
    return {path: (status.st_size, status.st_mtime_ns) for path, status in statuses}


def unpack_archive(file: Path, folder: Path) -> None:
    """Unpack one of our own archives. Python 3.11 before .4 has no filter."""
    options: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(file) as archive:
        archive.extractall(folder, **options)


def unpack_kept_run(folder: Path) -> Path:
    """The run directory of experiment `kept`, trial `run`, below a folder."""
    unpack_archive(KEPT_RUN_FILE, folder)
    (run,) = folder.glob("*/*/recipe.yaml")
    return run.parent
