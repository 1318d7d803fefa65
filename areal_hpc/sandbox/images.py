"""Cache of root file systems, unpacked from archives once per node, in the temporary folder.

An archive is a tar of all files, or an image of the Open Container Initiative (OCI), as `podman
save --format oci-archive` writes it (OCI image specification 1.1: image-layout.md, manifest.md,
config.md, layer.md). The digest of every blob is checked.
"""

import asyncio
import contextlib
import errno
import fcntl
import gzip
import hashlib
import itertools
import json
import lzma
import os
import platform
import secrets
import shutil
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.rundir.files import write_atomic_private
from areal_hpc.sandbox.sandbox import SandboxSpec
from areal_hpc.sandbox.unpacked_tree import BoundedStream, UnpackedTree

MAX_DOCUMENT_BYTES = 4 << 20
"""Maximum size of an index, a manifest or a configuration."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_LAYOUT_FILE, _INDEX_FILE = "oci-layout", "index.json"
_PIECE_BYTES = 1 << 20
MAX_ROOT_BYTES = 64 << 30
"""Maximum total size of a root file system's files."""
MAX_ROOT_FILES = 4_000_000
_MAX_ARCHIVE_FILES = 10_000
"""Maximum number of files in an image's archive: a few documents, and one for each layer."""
_SKIPPED_FOLDERS = ("dev", "proc", "sys")
"""Folders whose contents are not unpacked, because a sandbox has its own."""


@dataclass(frozen=True, slots=True)
class OciImage:
    """OCI image in an archive, with the environment that its commands expect."""

    archive: Path
    manifest_digest: str
    layers: tuple[Mapping[str, Any], ...]
    """Descriptors of the layers, the lowest first."""
    variables: Mapping[str, str]
    work_dir: str
    labels: Mapping[str, str]


def read_image(archive: Path) -> OciImage | None:
    """Read the image in an archive; None if the archive is no OCI image."""
    try:
        with _open_archive(archive) as file:
            blobs = _Blobs(archive, file)
            return _read_manifest(archive, blobs) if blobs.has_oci_layout else None
    except tarfile.ReadError:  # compressed, or no tar at all
        return None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _build_image_error(archive, f"it is damaged ({error!r})") from error


def unpack_image(image: OciImage, folder: Path) -> None:
    """Write the files of all layers into an empty folder; they belong to the calling user."""
    tree = make_root_tree(folder)
    with _open_archive(image.archive) as file:
        blobs = _Blobs(image.archive, file)
        for layer in image.layers:
            stream = _HashedReader(blobs.open(layer["digest"]))
            content = _open_layer(image.archive, str(layer["mediaType"]), stream)
            try:
                tree.write_archive(content, is_layer=True)
            except (tarfile.TarError, EOFError, ValueError, zlib.error, gzip.BadGzipFile) as error:
                raise _build_image_error(
                    image.archive, f"a layer cannot be read: {error}"
                ) from error
            if stream.finish_digest() != layer["digest"]:
                raise _build_image_error(image.archive, f"{layer['digest']} is another's content")
    tree.apply_folder_modes()


def make_root_tree(folder: Path) -> UnpackedTree:
    return UnpackedTree(
        folder,
        max_bytes=MAX_ROOT_BYTES,
        max_files=MAX_ROOT_FILES,
        skipped_folders=_SKIPPED_FOLDERS,
    )


@contextlib.contextmanager
def _open_archive(archive: Path) -> Iterator[tarfile.TarFile]:
    with archive.open("rb") as file:
        bounded: Any = BoundedStream(file, sys.maxsize, can_go_back=True)
        with tarfile.open(fileobj=bounded, mode="r:") as tar_file:
            yield tar_file


class _Blobs:
    def __init__(self, archive: Path, file: tarfile.TarFile) -> None:
        self._archive, self._file = archive, file
        self._members: dict[str, tarfile.TarInfo] = {}
        first = file.next()
        top = "" if first is None else first.name.removeprefix("./").partition("/")[0]
        if top in ("blobs", _LAYOUT_FILE, _INDEX_FILE, "."):  # other tars may be long to read
            members = itertools.islice(file, _MAX_ARCHIVE_FILES)
            self._members = {member.name.removeprefix("./"): member for member in members}

    @property
    def has_oci_layout(self) -> bool:
        return {_LAYOUT_FILE, _INDEX_FILE} <= self._members.keys()

    def open(self, digest: str) -> IO[bytes]:
        algorithm, _, name = digest.partition(":")
        if algorithm != "sha256":
            raise _build_image_error(self._archive, f"digests of {algorithm} are not known")
        stream = self._file.extractfile(self._members[f"blobs/{algorithm}/{name}"])
        if stream is None:
            raise ValueError(digest)
        return stream

    def read_index(self) -> dict[str, Any]:
        stream = self._file.extractfile(self._members[_INDEX_FILE])
        assert stream is not None
        return dict(json.loads(stream.read(MAX_DOCUMENT_BYTES)))

    def read_document(self, digest: str) -> dict[str, Any]:
        content = self.open(digest).read(MAX_DOCUMENT_BYTES)
        if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
            raise ValueError(f"{digest} is another's content")
        return dict(json.loads(content))


class _HashedReader:
    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._digest = stream, hashlib.sha256()

    def read(self, size: int) -> bytes:
        piece = self._stream.read(size)
        self._digest.update(piece)
        return piece

    def finish_digest(self) -> str:
        while self.read(_PIECE_BYTES):
            pass
        return f"sha256:{self._digest.hexdigest()}"


def _read_manifest(archive: Path, blobs: _Blobs) -> OciImage:
    document, digest = blobs.read_index(), ""
    while "manifests" in document:  # an index may list further ones, one for each platform
        digest = _choose_manifest_digest(archive, document["manifests"])
        document = blobs.read_document(digest)
    config = blobs.read_document(document["config"]["digest"]).get("config") or {}
    for layer in document["layers"]:
        blobs.open(layer["digest"])  # fails if the layer is missing
    return OciImage(
        archive,
        digest,
        tuple(document["layers"]),
        dict(variable.partition("=")[::2] for variable in config.get("Env") or ()),
        config.get("WorkingDir") or "",
        config.get("Labels") or {},
    )


def _choose_manifest_digest(archive: Path, manifests: list[dict[str, Any]]) -> str:
    arch = _ARCHITECTURES.get(platform.machine(), platform.machine())
    for manifest in manifests:
        target = manifest.get("platform", {})
        if target.get("architecture", arch) == arch and target.get("os", "linux") == "linux":
            return str(manifest["digest"])
    raise _build_image_error(archive, f"there is no image for linux on {arch} in it")


def _open_layer(archive: Path, media_type: str, stream: _HashedReader) -> Any:
    if media_type.endswith("gzip"):
        return gzip.GzipFile(fileobj=stream)  # type: ignore[call-overload]
    if media_type.endswith("tar"):
        return stream
    raise _build_image_error(archive, f"layers of type {media_type} cannot be read")


def _build_image_error(archive: Path, reason: str) -> RecipeError:
    return RecipeError(
        f"{archive} is an image that cannot be used: {reason}",
        key=str(archive),
        hint="write it with `podman save --format oci-archive`",
    )


ROOT_KEPT_S = 7 * 86400.0
"""Time since its last use after which a root is removed."""
_OPENERS_BY_MAGIC: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"\xfd7zXZ": lzma.open,
}
_LOCK_SUFFIX, _PARTIAL_SUFFIX, _SECRET_NAME = ".lock", ".partial", "secret"


async def unpack_root(spec: SandboxSpec, owner: int | None = None) -> SandboxSpec:
    """Unpack a spec's root if it is an archive, and return the spec with the folder instead."""
    if spec.root is None or not spec.root.is_file():
        return spec
    return replace(spec, root=await asyncio.to_thread(get_cached_root, spec.root, owner))


def get_cached_root(archive: Path, owner_uid: int | None = None) -> Path:
    """Return the folder of an archive's content on this node; the first call unpacks it.

    `owner_uid` is the user who gets the files, by default the calling one.
    """
    cache = make_cache_folder()
    image, state = read_image(archive), archive.stat()
    identity = f"{archive.resolve()} {state.st_size} {state.st_mtime_ns} {owner_uid}"
    if image is not None:  # tasks may share an image, each with an archive of its own
        identity = f"{image.manifest_digest} {owner_uid}"
    # Files of an image may be writable by all, and others may enter root's folder.
    name = hashlib.sha256(f"{_read_secret(cache)} {identity}".encode()).hexdigest()[:32]
    folder = cache / name
    with _hold_file_lock(folder) as lock:
        os.utime(lock)  # `_remove_old_roots` reads it as the last use
        if not folder.is_dir():
            _remove_old_roots(cache)
            partial = _remove_partial(folder)
            partial.mkdir(mode=0o700)
            try:
                _unpack(archive, image, partial)
                _hand_over_tree(partial, owner_uid)
                partial.rename(folder)
            except BaseException:  # boundary: after any error the partial folder is removed
                _remove_partial(folder)
                raise
    return folder


def make_cache_folder() -> Path:
    """Make this user's folder of unpacked root file systems, closed to others.

    Root's may be entered, because its sandboxes run as another user; the names in it are secret.
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
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ClusterError(
            f"{archive} cannot be unpacked into {folder.parent}: {error}",
            hint="free some space there, or set TMPDIR on the nodes" if is_full else "",
        ) from error


def _unpack_tar(archive: Path, folder: Path) -> None:
    tree, reason = make_root_tree(folder), "it is empty"
    try:
        with _open_tar(archive) as stream:
            tree.write_archive(stream)
    except (tarfile.TarError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        reason = str(error)
    except OSError as error:
        if error.errno is not None:
            raise
        reason = str(error)  # gzip reports a file of another format without errno
    else:
        tree.apply_folder_modes()
        if any(folder.iterdir()):
            return
    raise RecipeError(
        f"{archive} is no archive of a root file system: {reason[-300:]}",
        key=str(archive),
        hint="write one with `podman export`, or `tar -C FOLDER -cf root.tar .`",
    )


def _open_tar(archive: Path) -> Any:
    with archive.open("rb") as file:
        start = file.read(max(map(len, _OPENERS_BY_MAGIC)))
    openers = (opener for magic, opener in _OPENERS_BY_MAGIC.items() if start.startswith(magic))
    return next(openers, lambda path: path.open("rb"))(archive)


def _hand_over_tree(folder: Path, owner: int | None) -> None:
    folder.chmod(0o755)
    if owner is not None:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, owner, owner, follow_symlinks=False)


@contextlib.contextmanager
def _hold_file_lock(folder: Path, *, waits: bool = True) -> Iterator[int]:
    """Hold a root's lock, without which no process makes or removes it; yield its descriptor."""
    path = folder.with_suffix(_LOCK_SUFFIX)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        yield descriptor
    finally:
        os.close(descriptor)
