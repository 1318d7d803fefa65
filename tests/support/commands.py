"""Programs, run in the checkout to their end, and `areal-hpc` in this process."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from areal_hpc.cli.main import main
from tests.support.environments import CHECKOUT
from tests.support.forked_processes import run_module
from tests.support.waiting import communicate

COMMAND_TIMEOUT_S = 110.0
PROGRAM = (sys.executable, "-m", "areal_hpc")


def run_program(
    *words: object,
    folder: Path = CHECKOUT,
    environ: Mapping[str, str] | None = None,
    timeout_s: float | None = COMMAND_TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        [*map(str, words)],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        output, errors = communicate(process, timeout_s)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def areal_hpc(
    *arguments: object,
    environ: Mapping[str, str] | None = None,
    timeout_s: float | None = COMMAND_TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    environ = os.environ if environ is None else environ
    return run_module(["areal_hpc", *map(str, arguments)], CHECKOUT, environ, timeout_s)


def start_areal_hpc(
    *arguments: object, environ: Mapping[str, str], before: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start `areal-hpc` behind the words of `before`; its standard output is a pipe."""
    return subprocess.Popen(
        [*map(str, (*before, *PROGRAM, *arguments))],
        cwd=CHECKOUT,
        env={**environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def exit_code_of(*arguments: object) -> int:
    """Run `areal-hpc` in this process, which must exit, and return its code."""
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    assert isinstance(end.value.code, int)
    return end.value.code


def said_by(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def audit_of(run_dir: Path, environ: Mapping[str, str] | None = None) -> str:
    """The last line of `areal-hpc audit`, which must find nothing at fault."""
    return said_by(areal_hpc("audit", run_dir, environ=environ)).splitlines()[-1]


def write_program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path


def only_programs(folder: Path, *names: str) -> str:
    """A PATH that has these programs, besides those of the folder itself."""
    for name in names:
        program = shutil.which(name)
        assert program, name
        (folder / name).symlink_to(program)
    return str(folder)
