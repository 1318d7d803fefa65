"""Root file systems that lie in an archive: unpacked once per node, below the temporary folder.

An archive is a tar of all files, or an image of the Open Container Initiative (`oci_image.py`).
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.sandbox.images.oci_image import OciImage, read_image, unpack_image
from areal_hpc.sandbox.spec import SandboxSpec

UNPACK_TIMEOUT_S = 1800.0
"""A large one on a slow disk."""
_LEFT_OUT_PATTERNS = ("./dev/*", "dev/*", "./proc/*", "proc/*", "./sys/*", "sys/*")
"""A sandbox has its own, and no ordinary user can make devices."""


async def unpack_root_if_archive(spec: SandboxSpec, owner: int | None = None) -> SandboxSpec:
    """The same sandbox with a folder as its root, where that is an archive.

    Raises: see `get_or_unpack_root`.
    """
    if spec.root is None or not spec.root.is_file():
        return spec
    return replace(spec, root=await asyncio.to_thread(get_or_unpack_root, spec.root, owner))


def get_or_unpack_root(archive: Path, owner: int | None = None) -> Path:
    """The folder of an archive's content on this node; the first who asks unpacks it.

    `owner` is whom the files are given to; None: who runs this.

    Raises:
        RecipeError: It is no archive that tar(1) reads, and no image.
        ClusterError: There is no room for it.
    """
    cache = make_cache_folder()
    image, state = read_image(archive), archive.stat()
    identity = f"{archive.resolve()} {state.st_size} {state.st_mtime_ns} {owner}"
    if image is not None:  # tasks may share it, each with an archive of its own
        identity = f"{image.digest} {owner}"
    folder = cache / hashlib.sha256(identity.encode()).hexdigest()[:32]
    with _hold_file_lock(cache / f"{folder.name}.lock"):
        if not folder.is_dir():
            partial = Path(tempfile.mkdtemp(prefix="partial-", dir=cache))
            try:
                _unpack(archive, image, partial)
                _chmod_root_and_chown_tree(partial, owner)
                partial.rename(folder)
            except BaseException:  # boundary: whatever it is, nothing half-done stays
                shutil.rmtree(partial, ignore_errors=True)
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


def _unpack(archive: Path, image: OciImage | None, folder: Path) -> None:
    if image is None:
        _unpack_tar(archive, folder)
        return
    try:
        unpack_image(image, folder)
    except OSError as error:
        raise _build_space_error(archive, folder, str(error)) from error


def _unpack_tar(archive: Path, folder: Path) -> None:
    command = ["tar", "--extract", "--file", str(archive), "--directory", str(folder)]
    command += ["--no-same-owner", "--no-same-permissions"]
    command += [f"--exclude={name}" for name in _LEFT_OUT_PATTERNS]
    try:
        told = subprocess.run(
            command, capture_output=True, timeout=UNPACK_TIMEOUT_S, check=False, cwd="/"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{archive} cannot be unpacked: {error}") from error
    said = told.stderr.decode(errors="replace").strip()
    if told.returncode != 0 and "No space left" in said:
        raise _build_space_error(archive, folder, said)
    if told.returncode != 0 or not any(folder.iterdir()):
        raise RecipeError(
            f"{archive} is no archive of a root file system: {said[-300:] or 'it is empty'}",
            key=str(archive),
            hint="write one with `podman export`, or `tar -C FOLDER -cf root.tar .`",
        )


def _build_space_error(archive: Path, folder: Path, why: str) -> ClusterError:
    return ClusterError(
        f"{archive} cannot be unpacked into {folder.parent}: {why[-300:]}",
        hint="free some space there, or set TMPDIR on the nodes",
    )


def _chmod_root_and_chown_tree(folder: Path, owner: int | None) -> None:
    folder.chmod(0o755)
    if owner is not None:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, owner, owner, follow_symlinks=False)


@contextlib.contextmanager
def _hold_file_lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
