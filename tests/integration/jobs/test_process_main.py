"""The main of every process of a job, in a process."""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from tests.support.commands import run_program, said_by

LOW = 200


def write_limit(config: dict[str, Any]) -> None:
    """What the process under test does."""
    Path(config["out"]).write_text(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def test_a_process_may_open_as_many_files_as_the_machine_allows(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > LOW
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"out": str(tmp_path / "limit")}))
    entry = ("areal_hpc.jobs.process_main", f"{__name__}:write_limit", str(config))
    limited = ("bash", "-c", f'ulimit -Sn {LOW}; exec "$@"', "-", sys.executable, "-m", *entry)
    environ = {**os.environ, "AREAL_HPC_SUPERVISOR_PID": str(os.getpid())}
    said_by(run_program(*limited, environ=environ))
    assert int((tmp_path / "limit").read_text()) == hard
