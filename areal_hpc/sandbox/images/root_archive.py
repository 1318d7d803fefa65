"""Root file systems that lie in an archive: unpacked once per node, below the temporary folder.

An archive is a tar of all files, or an image of the Open Container Initiative (`oci_image.py`).
"""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.sandbox.images.oci_image import OciImage, read_image, unpack_image
from areal_hpc.sandbox.spec import SandboxSpec

UNPACK_TIMEOUT_S = 1800.0
"""A large one on a slow disk."""
ROOT_KEPT_S = 7 * 86400.0
"""A root that no sandbox was started from for so long makes room for others."""
_LEFT_OUT_PATTERNS = [
    f"{top}{name}/*" for name in ("dev", "proc", "sys") for top in ("", "./", "/")
]
"""Patterns of the top alone: a sandbox has its own, and no ordinary user can make devices."""
_LOCK_SUFFIX, _PARTIAL_SUFFIX = ".lock", ".partial"


async def unpack_root_if_archive(spec: SandboxSpec, owner: int | None = None) -> SandboxSpec:
    """The same sandbox with a folder as its root, where that is an archive.

    Raises: see `get_or_unpack_cached_root`.
    """
    if spec.root is None or not spec.root.is_file():
        return spec
    return replace(spec, root=await asyncio.to_thread(get_or_unpack_cached_root, spec.root, owner))


def get_or_unpack_cached_root(archive: Path, owner_uid: int | None = None) -> Path:
    """The folder of an archive's content on this node; the first who asks unpacks it.

    `owner_uid` is whom the files are given to; None: who runs this.

    Raises:
        RecipeError: It is no archive that tar(1) reads, and no image.
        ClusterError: There is no room for it, or it cannot be written.
    """
    cache = make_cache_folder()
    image, state = read_image(archive), archive.stat()
    identity = f"{archive.resolve()} {state.st_size} {state.st_mtime_ns} {owner_uid}"
    if image is not None:  # tasks may share it, each with an archive of its own
        identity = f"{image.manifest_digest} {owner_uid}"
    folder = cache / hashlib.sha256(identity.encode()).hexdigest()[:32]
    with _hold_file_lock(folder) as lock:
        os.utime(lock)  # tells that it is used
        if not folder.is_dir():
            _remove_partial_and_unused_roots(cache)
            partial = _remove_partial(folder)
            partial.mkdir(mode=0o700)
            try:
                _unpack(archive, image, partial, lock)
                _chmod_root_and_chown_tree(partial, owner_uid)
                partial.rename(folder)
            except BaseException:  # boundary: whatever it is, nothing half-done stays
                _remove_partial(folder)
                raise
    return folder


def make_cache_folder() -> Path:
    """The folder of this user's unpacked root file systems, closed to others' writing.

    Raises:
        ClusterError: Somebody else has made it.
    """
    cache = Path(tempfile.gettempdir()) / f"areal-hpc-roots-{os.geteuid()}"
    cache.mkdir(mode=0o711, exist_ok=True)
    state = cache.lstat()
    if cache.is_symlink() or state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise ClusterError(
            f"{cache} belongs to another user, or others may write there",
            key=str(cache),
            hint="remove it, or set TMPDIR",
        )
    return cache


def _remove_partial_and_unused_roots(cache: Path) -> None:
    """Remove what killed processes left half-unpacked, and roots that nobody uses any more."""
    for folder in {path.with_suffix("") for path in cache.iterdir()}:
        with contextlib.suppress(BlockingIOError), _hold_file_lock(folder, waits=False) as lock:
            _remove_partial(folder)
            if folder.is_dir() and time.time() - os.fstat(lock).st_mtime > ROOT_KEPT_S:
                folder.rename(folder.with_suffix(_PARTIAL_SUFFIX))
                _remove_partial(folder)


def _remove_partial(folder: Path) -> Path:
    """Remove a half-unpacked root, also folders of it that are closed to their owner; its path."""
    partial = folder.with_suffix(_PARTIAL_SUFFIX)
    for parent, names, _ in os.walk(partial):
        for path in (Path(parent, name) for name in names):
            if not path.is_symlink():
                path.chmod(0o700)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(partial)
    return partial


def _unpack(archive: Path, image: OciImage | None, folder: Path, lock_fd: int) -> None:
    if image is None:
        _unpack_tar(archive, folder, lock_fd)
        return
    try:
        unpack_image(image, folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _build_space_error(archive, folder, str(error)) from error
        raise ClusterError(f"{archive} cannot be unpacked into {folder.parent}: {error}") from error


def _unpack_tar(archive: Path, folder: Path, lock_fd: int) -> None:
    command = ["tar", "--extract", "--file", str(archive), "--directory", str(folder)]
    command += ["--no-same-owner", "--no-same-permissions", "--anchored"]
    command += [f"--exclude={name}" for name in _LEFT_OUT_PATTERNS]
    try:
        told = subprocess.run(
            command,
            capture_output=True,
            timeout=UNPACK_TIMEOUT_S,
            check=False,
            cwd="/",
            pass_fds=[lock_fd],  # if this process is killed, tar holds it on to its end
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{archive} cannot be unpacked: {error}") from error
    said = told.stderr.decode(errors="replace").strip()
    if told.returncode != 0 and ("No space left" in said or "Disk quota exceeded" in said):
        raise _build_space_error(archive, folder, said)
    if told.returncode != 0 or not any(folder.iterdir()):
        raise RecipeError(
            f"{archive} is no archive of a root file system: {said[-300:] or 'it is empty'}",
            key=str(archive),
            hint="write one with `podman export`, or `tar -C FOLDER -cf root.tar .`",
        )


def _build_space_error(archive: Path, folder: Path, reason: str) -> ClusterError:
    return ClusterError(
        f"{archive} cannot be unpacked into {folder.parent}: {reason[-300:]}",
        hint="free some space there, or set TMPDIR on the nodes",
    )


def _chmod_root_and_chown_tree(folder: Path, owner: int | None) -> None:
    folder.chmod(0o755)
    if owner is not None:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, owner, owner, follow_symlinks=False)


@contextlib.contextmanager
def _hold_file_lock(folder: Path, *, waits: bool = True) -> Iterator[int]:
    """Within the context nobody else makes or removes a root; the descriptor of the lock.

    Raises:
        BlockingIOError: Somebody does, and this one does not wait.
    """
    path = folder.with_suffix(_LOCK_SUFFIX)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        yield descriptor
    finally:
        os.close(descriptor)
