"""Files of SGLang servers on a node: compiler caches, and shared memory of killed servers.

Triton, TorchInductor, FlashInfer, DeepGEMM and SGLang itself compile kernels for the GPU when a
server starts, and store them below the user's home by default. There all servers of a run would
write at once over the network, and kernels for one kind of GPU do not fit another.

A killed server leaves its files in /dev/shm, where they take memory until the node restarts; once
it is full, the next server dies of SIGBUS at its start. SGLang itself removes them only in its own
tests (sglang 0.5.23, `srt/utils/stale_shm_cleanup.py`).
"""

import logging
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

SHARED_MEMORY_DIR = Path("/dev/shm")
_SGLANG_PREFIXES = ("sglang_loads_", "sgl_shm_", "multi_tokenizer_args_")
"""Prefixes of file names that only SGLang uses."""
_MIN_AGE_S = 30.0
"""Minimum age of a stale file; a younger one may not have been opened yet by its second process."""
_CACHE_VARIABLES = {
    # SGLang derives the variables of Triton, FlashInfer, DeepGEMM and CUDA's own compiler from this
    # one (sglang 0.5.23, `srt/environ.py`).
    "SGLANG_CACHE_DIR": "",
    "SGLANG_JIT_CACHE_DIR": "jit",
    # SGLang would derive it, too, but changes its environment for that, so that setproctitle cannot
    # write titles any more, by which SGLang's processes are found.
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}


def build_cache_variables(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Build variables that put a server's compiler caches below a folder, unless they are set."""
    root = Path(environ.get("SGLANG_CACHE_DIR", folder))
    return {
        name: environ.get(name, str(root / subfolder))
        for name, subfolder in _CACHE_VARIABLES.items()
    }


def make_cache_dir(fallback: Path) -> Path:
    """Create this user's folder of compiler caches on the node, which later servers use, too.

    Servers execute the files in it. If the folder belongs to another user, or others may write to
    it, the fallback is returned, in which each server compiles again.
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


def remove_stale_files() -> list[Path]:
    """Remove files of this user's killed servers that no process uses; return their paths."""
    newest_stale_at = time.time() - _MIN_AGE_S
    stale: set[Path] = set()
    with suppress(FileNotFoundError):
        for path in SHARED_MEMORY_DIR.iterdir():
            with suppress(OSError):
                status = path.lstat()
                is_own_file = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
                is_old = status.st_mtime < newest_stale_at
                if path.name.startswith(_SGLANG_PREFIXES) and is_own_file and is_old:
                    stale.add(path)
    for process in Path("/proc").glob("[0-9]*") if stale else ():
        stale -= _list_process_files(process)
    for path in stale:
        path.unlink(missing_ok=True)
    return sorted(stale)


def _list_process_files(process: Path) -> set[Path]:
    """List the files that a process maps or has open, as far as this user may read them."""
    files: set[Path] = set()
    with suppress(OSError):
        for line in (process / "maps").read_text(errors="surrogateescape").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                files.add(Path(fields[5]))
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                files.add(descriptor.readlink())
    return files
