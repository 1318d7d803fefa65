"""Shared memory of SGLang servers that were killed.

A server that ends by force leaves its files in /dev/shm, where they take memory until the node is
started anew; once it is full, the next server dies of SIGBUS as it starts. SGLang itself cleans up
in its own tests alone (sglang 0.5.23, `srt/utils/stale_shm_cleanup.py`).
"""

import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY_DIR = Path("/dev/shm")
_SGLANG_PREFIXES = ("sglang_loads_", "sgl_shm_", "multi_tokenizer_args_")
"""Names that nothing but SGLang gives."""
_POSSIBLE_SERVER_PREFIXES = (*_SGLANG_PREFIXES, "psm_", "torch_", "nccl-")
"""A server has these, and other programs have such, too: they go with the server that used them."""
_MIN_AGE_S = 30.0
"""A file so young may be between its creation by one process and its opening by another."""


def list_shared_memory_files_in_use(pids: Iterable[int]) -> set[Path]:
    """Shared memory that some processes map or hold open, as far as they may be asked."""
    return {
        path
        for pid in pids
        for path in _list_process_files(pid)
        if path.parent == SHARED_MEMORY_DIR
    }


def remove_unused_files(paths: Iterable[Path], dead_session: int | None = None) -> list[Path]:
    """Remove those of the files that no process uses; what was removed.

    Processes of the dead session do not count: they have been killed, and take a moment to end.
    """
    used = list_shared_memory_files_in_use(_list_user_pids(without_session=dead_session))
    removed = []
    for path in paths:
        if path not in used:
            with suppress(OSError):  # gone, or another user's
                path.unlink()
                removed.append(path)
    return removed


def remove_files_of_dead_servers() -> list[Path]:
    """Remove what this user's servers left that ended with their whole node or job."""
    oldest_kept_at = time.time() - _MIN_AGE_S
    stale: list[Path] = []
    with suppress(FileNotFoundError):
        for path in SHARED_MEMORY_DIR.iterdir():
            with suppress(OSError):
                status = path.lstat()
                is_own_file = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
                is_old = status.st_mtime < oldest_kept_at
                if path.name.startswith(_SGLANG_PREFIXES) and is_own_file and is_old:
                    stale.append(path)
    return remove_unused_files(stale) if stale else []


def list_files_of_live_server_session(session: int) -> set[Path]:
    files = list_shared_memory_files_in_use(_list_user_pids(of_session=session))
    return {path for path in files if path.name.startswith(_POSSIBLE_SERVER_PREFIXES)}


def _list_user_pids(
    *, of_session: int | None = None, without_session: int | None = None
) -> Iterator[int]:
    """Processes that may use this user's files, those of the same user: all, or of one session.

    A session that was begun outside this container has the number 0, as `getsid` says it.
    """
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and entry.stat().st_uid == os.getuid():
                session = os.getsid(int(entry.name))
                if session != without_session and of_session in (None, session):
                    yield int(entry.name)


def _list_process_files(pid: int) -> set[Path]:
    found: set[Path] = set()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                found.add(Path(fields[5]))
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(descriptor.readlink())
    return found
