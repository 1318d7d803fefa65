"""Root file systems that lie in an archive: unpacked once per node, below the temporary folder.

An archive is a tar of all files, or an image of the Open Container Initiative (`oci_image.py`).
"""

import asyncio
import contextlib
import errno
import fcntl
import gzip
import hashlib
import lzma
import os
import secrets
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.rundir.files import write_atomic_private
from areal_hpc.sandbox.images.oci_image import (
    OciImage,
    make_root_tree,
    read_image,
    unpack_image,
)
from areal_hpc.sandbox.spec import SandboxSpec

ROOT_KEPT_S = 7 * 86400.0
"""A root that no sandbox was started from for so long makes room for others."""
_OPENERS_BY_MAGIC: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"\xfd7zXZ": lzma.open,
}
_LOCK_SUFFIX, _PARTIAL_SUFFIX, _SECRET_NAME = ".lock", ".partial", "secret"


async def unpack_root(spec: SandboxSpec, owner: int | None = None) -> SandboxSpec:
    """The same sandbox with a folder as its root, where that is an archive."""
    if spec.root is None or not spec.root.is_file():
        return spec
    return replace(spec, root=await asyncio.to_thread(get_cached_root, spec.root, owner))


def get_cached_root(archive: Path, owner_uid: int | None = None) -> Path:
    """The folder of an archive's content on this node; the first who asks unpacks it.

    `owner_uid` is whom the files are given to; None: who runs this.
    """
    cache = make_cache_folder()
    image, state = read_image(archive), archive.stat()
    identity = f"{archive.resolve()} {state.st_size} {state.st_mtime_ns} {owner_uid}"
    if image is not None:  # tasks may share it, each with an archive of its own
        identity = f"{image.manifest_digest} {owner_uid}"
    # Files of an image may be anybody's to write, and others may enter root's folder.
    name = hashlib.sha256(f"{_read_secret(cache)} {identity}".encode()).hexdigest()[:32]
    folder = cache / name
    with _hold_file_lock(folder) as lock:
        os.utime(lock)  # tells that it is used
        if not folder.is_dir():
            _remove_old_roots(cache)
            partial = _remove_partial(folder)
            partial.mkdir(mode=0o700)
            try:
                _unpack(archive, image, partial)
                _hand_over_tree(partial, owner_uid)
                partial.rename(folder)
            except BaseException:  # boundary: whatever it is, nothing half-done stays
                _remove_partial(folder)
                raise
    return folder


def make_cache_folder() -> Path:
    """The folder of this user's unpacked root file systems, closed to others.

    Root's may be entered, for sandboxes run as another user; nobody knows the names in it.
    """
    cache = Path(tempfile.gettempdir()) / f"areal-hpc-roots-{os.geteuid()}"
    mode = 0o711 if os.geteuid() == 0 else 0o700
    cache.mkdir(mode=mode, exist_ok=True)
    state = cache.lstat()
    if cache.is_symlink() or state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise ClusterError(
            f"{cache} belongs to another user, or others may write there",
            key=str(cache),
            hint="remove it, or set TMPDIR",
        )
    cache.chmod(mode)
    return cache


def _read_secret(cache: Path) -> str:
    path = cache / _SECRET_NAME
    with _hold_file_lock(path):
        if not path.exists():
            write_atomic_private(path, secrets.token_hex().encode())
        return path.read_text()


def _remove_old_roots(cache: Path) -> None:
    for folder in {path.with_suffix("") for path in cache.iterdir()}:
        with contextlib.suppress(BlockingIOError), _hold_file_lock(folder, waits=False) as lock:
            _remove_partial(folder)
            if folder.is_dir() and time.time() - os.fstat(lock).st_mtime > ROOT_KEPT_S:
                folder.rename(folder.with_suffix(_PARTIAL_SUFFIX))
                _remove_partial(folder)


def _remove_partial(folder: Path) -> Path:
    partial = folder.with_suffix(_PARTIAL_SUFFIX)
    for parent, names, _ in os.walk(partial):
        for path in (Path(parent, name) for name in names):
            if not path.is_symlink():
                path.chmod(0o700)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(partial)
    return partial


def _unpack(archive: Path, image: OciImage | None, folder: Path) -> None:
    try:
        if image is not None:
            unpack_image(image, folder)
        else:
            _unpack_tar(archive, folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ClusterError(
                f"{archive} cannot be unpacked into {folder.parent}: {error}",
                hint="free some space there, or set TMPDIR on the nodes",
            ) from error
        raise ClusterError(f"{archive} cannot be unpacked into {folder.parent}: {error}") from error


def _unpack_tar(archive: Path, folder: Path) -> None:
    tree, said = make_root_tree(folder), "it is empty"
    try:
        with _open_tar(archive) as stream:
            tree.write_archive(stream)
    except (tarfile.TarError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        said = str(error)
    except OSError as error:
        if error.errno is not None:
            raise
        said = str(error)  # as gzip says that it is none
    else:
        tree.apply_folder_modes()
        if any(folder.iterdir()):
            return
    raise RecipeError(
        f"{archive} is no archive of a root file system: {said[-300:]}",
        key=str(archive),
        hint="write one with `podman export`, or `tar -C FOLDER -cf root.tar .`",
    )


def _open_tar(archive: Path) -> Any:
    with archive.open("rb") as file:
        start = file.read(max(map(len, _OPENERS_BY_MAGIC)))
    openers = (one for magic, one in _OPENERS_BY_MAGIC.items() if start.startswith(magic))
    return next(openers, lambda path: path.open("rb"))(archive)


def _hand_over_tree(folder: Path, owner: int | None) -> None:
    folder.chmod(0o755)
    if owner is not None:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, owner, owner, follow_symlinks=False)


@contextlib.contextmanager
def _hold_file_lock(folder: Path, *, waits: bool = True) -> Iterator[int]:
    """Within the context nobody else makes or removes a root; the descriptor of the lock."""
    path = folder.with_suffix(_LOCK_SUFFIX)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        yield descriptor
    finally:
        os.close(descriptor)
