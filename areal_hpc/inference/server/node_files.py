"""Files that SGLang servers have on a node: compiler caches, and shared memory of killed ones.

Triton, TorchInductor, FlashInfer, DeepGEMM and SGLang itself compile kernels for the GPU as a
server starts, and by default they leave them below the user's home. There all servers of a run
would write at once, over the network, and what was compiled for one kind of GPU fits no other.

A server that ends by force leaves its files in /dev/shm, where they take memory until the node is
started anew; once it is full, the next server dies of SIGBUS as it starts. SGLang itself cleans up
in its own tests alone (sglang 0.5.23, `srt/utils/stale_shm_cleanup.py`).
"""

import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

SHARED_MEMORY_DIR = Path("/dev/shm")
_SGLANG_PREFIXES = ("sglang_loads_", "sgl_shm_", "multi_tokenizer_args_")
"""Names that nothing but SGLang gives."""
_POSSIBLE_SERVER_PREFIXES = (*_SGLANG_PREFIXES, "psm_", "torch_", "nccl-")
"""A server has these, and other programs have such, too: they go with the server that used them."""
_MIN_AGE_S = 30.0
"""A file so young may be between its creation by one process and its opening by another."""
_CACHE_VARIABLES = {
    # From this one SGLang derives those of Triton, FlashInfer, DeepGEMM and CUDA's own compiler
    # (sglang 0.5.23, `srt/environ.py`).
    "SGLANG_CACHE_DIR": "",
    "SGLANG_JIT_CACHE_DIR": "jit",
    # SGLang would derive it, too, but by changing its environment, and setproctitle then finds
    # nothing to write into: SGLang's processes are known by their titles.
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}


def build_cache_variables(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Variables that put a server's compiler caches below a folder, but for those already set."""
    root = Path(environ.get("SGLANG_CACHE_DIR", folder))
    return {
        name: environ.get(name, str(root / subfolder))
        for name, subfolder in _CACHE_VARIABLES.items()
    }


def make_cache_dir(fallback: Path) -> Path:
    """The node's folder of caches for this user, kept for later servers.

    Servers run what they find there: where the folder belongs to another user, or others may write
    in it, the fallback is returned, in which each server compiles anew.
    """
    folder = Path(tempfile.gettempdir()) / f"areal_hpc-compiled-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        log.warning("compiled kernels are not kept for later servers: %s", error)
        return fallback
    is_private = status.st_uid == os.getuid() and not status.st_mode & 0o077
    if stat.S_ISDIR(status.st_mode) and is_private:
        return folder
    log.warning(
        "compiled kernels are not kept for later servers: "
        "expected %s to be a folder of user %d with mode 0700, got user %d and mode %04o",
        *(folder, os.getuid(), status.st_uid, stat.S_IMODE(status.st_mode)),
    )
    return fallback


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
