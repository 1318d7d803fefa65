"""The file of `doctor --json`: results, facts and measurements, for an issue or a script."""

import platform
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

import areal_hpc
from areal_hpc.launch.doctor.checks import CheckResult
from areal_hpc.launch.doctor.gpu.examination import GpuExamination
from areal_hpc.launch.provenance.repositories import read_repository
from areal_hpc.rundir.atomic import write_atomic


def write_evidence(
    path: Path, results: Sequence[CheckResult], examination: GpuExamination | None
) -> None:
    """Put it in place. It has no values of the environment, which may hold keys."""
    repository = read_repository(Path(__file__).parent)
    told: dict[str, Any] = {
        "areal_hpc": areal_hpc.__version__,
        "commit": repository.revision if repository else None,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "results": [
            {
                "name": one.name,
                "verdict": one.verdict.value,
                "finding": one.finding,
                "hint": one.hint,
            }
            for one in results
        ],
    }
    if examination is not None and "report" in vars(examination):
        told["gpu_report"] = examination.report
    encoded = msgspec.json.format(msgspec.json.encode(told, enc_hook=str), indent=2)
    write_atomic(path, encoded + b"\n")
