"""Compiler caches of SGLang, on the node.

Triton, TorchInductor, FlashInfer, DeepGEMM and SGLang itself compile kernels for the GPU as a
server starts, and by default they leave them below the user's home. There all servers of a run
would write at once, over the network, and what was compiled for one kind of GPU fits no other.
"""

import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

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
