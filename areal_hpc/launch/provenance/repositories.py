"""State of a git repository: its commit, and how the files differ from it."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import IO

MAX_PATCH_BYTES = 1 << 20
"""A longer patch is cut: it says that much was changed, and the copy of the code has the rest."""
MAX_UNTRACKED_FILES = 100
GIT_TIMEOUT_S = 20.0
_NO_LOCK_VARIABLES = {"GIT_OPTIONAL_LOCKS": "0"}
"""Looking at a repository must not write to it."""
_NO_EXTERNAL_PROGRAMS_OPTIONS = ("-c", "core.fsmonitor=false", "-c", "diff.external=")


@dataclass(frozen=True, slots=True)
class RepositoryState:
    root: str
    revision: str
    untracked: list[str]
    """Files that git does not know and does not ignore, the first of them."""
    patch: bytes
    is_patch_cut: bool


def read_repository(folder: Path) -> RepositoryState | None:
    """The repository that a folder lies in; None where there is none, or no git."""
    try:
        root = _run_git(folder, "rev-parse", "--show-toplevel").strip()
        revision = _run_git(folder, "rev-parse", "HEAD").strip()
        untracked = _run_git(Path(root), "ls-files", "--others", "--exclude-standard")
        patch = _read_patch(Path(root))
    except (OSError, subprocess.SubprocessError):
        return None
    return RepositoryState(
        root,
        revision,
        untracked.splitlines()[:MAX_UNTRACKED_FILES],
        patch[:MAX_PATCH_BYTES],
        len(patch) > MAX_PATCH_BYTES,
    )


def _run_git(folder: Path, *words: str) -> str:
    answer = subprocess.run(
        ["git", *_NO_EXTERNAL_PROGRAMS_OPTIONS, *words],
        cwd=folder,
        env=os.environ | _NO_LOCK_VARIABLES,
        capture_output=True,
        timeout=GIT_TIMEOUT_S,
        check=True,
    )
    return answer.stdout.decode(errors="replace")


def _read_patch(root: Path) -> bytes:
    command = [
        "git",
        *_NO_EXTERNAL_PROGRAMS_OPTIONS,
        "diff",
        "--no-ext-diff",
        "--no-textconv",
        "HEAD",
    ]
    with subprocess.Popen(
        command,
        cwd=root,
        env=os.environ | _NO_LOCK_VARIABLES,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        stream: IO[bytes] | None = process.stdout
        assert stream is not None
        timer = Timer(GIT_TIMEOUT_S, process.kill)
        timer.start()
        patch = stream.read(MAX_PATCH_BYTES + 1)
        if not timer.is_alive():
            raise subprocess.TimeoutExpired(command, GIT_TIMEOUT_S)
        timer.cancel()
        process.kill()  # if it has more to say
    return patch
