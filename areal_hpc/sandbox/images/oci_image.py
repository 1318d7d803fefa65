"""Images in archives of the Open Container Initiative (OCI): what they say, and their files.

As `podman save --format oci-archive` writes them (OCI image specification 1.1: image-layout.md,
manifest.md, config.md, layer.md). Every blob is held against its digest.
"""

import contextlib
import gzip
import hashlib
import itertools
import json
import platform
import sys
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from areal_hpc.errors import RecipeError
from areal_hpc.sandbox.unpacked_tree import BoundedStream, UnpackedTree

MAX_DOCUMENT_BYTES = 4 << 20
"""Of an index, a manifest, a configuration."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_LAYOUT_FILE, _INDEX_FILE = "oci-layout", "index.json"
_PIECE_BYTES = 1 << 20
MAX_ROOT_BYTES = 64 << 30
"""Of the files of a root file system."""
MAX_ROOT_FILES = 4_000_000
_MAX_ARCHIVE_FILES = 10_000
"""Of an image's archive: a few documents, and a file for each layer."""
_SKIPPED_FOLDERS = ("dev", "proc", "sys")
"""A sandbox has its own; nothing in them is kept."""


@dataclass(frozen=True, slots=True)
class OciImage:
    """An image: its digest, what commands in it expect, where its files are."""

    archive: Path
    manifest_digest: str
    layers: tuple[Mapping[str, Any], ...]
    """Their descriptors, the lowest first."""
    variables: Mapping[str, str]
    work_dir: str
    labels: Mapping[str, str]


def read_image(archive: Path) -> OciImage | None:
    """The image in an archive; None if that is a tar of something else."""
    try:
        with _open_archive(archive) as file:
            blobs = _Blobs(archive, file)
            return _read_manifest(archive, blobs) if blobs.has_oci_layout else None
    except tarfile.ReadError:  # compressed, or no tar at all
        return None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _build_image_error(archive, f"it is damaged ({error!r})") from error


def unpack_image(image: OciImage, folder: Path) -> None:
    """Write the files of all layers into an empty folder, all of them the caller's own."""
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
        with tarfile.open(fileobj=bounded, mode="r:") as opened:
            yield opened


class _Blobs:
    def __init__(self, archive: Path, file: tarfile.TarFile) -> None:
        self._archive, self._file = archive, file
        self._members: dict[str, tarfile.TarInfo] = {}
        first = file.next()
        top = "" if first is None else first.name.removeprefix("./").partition("/")[0]
        if top in ("blobs", _LAYOUT_FILE, _INDEX_FILE, "."):  # else a large tar is not read for it
            members = itertools.islice(file, _MAX_ARCHIVE_FILES)
            self._members = {one.name.removeprefix("./"): one for one in members}

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
    while "manifests" in document:  # an index may name others, one for each platform
        digest = _choose_manifest_digest(archive, document["manifests"])
        document = blobs.read_document(digest)
    config = blobs.read_document(document["config"]["digest"]).get("config") or {}
    for layer in document["layers"]:
        blobs.open(layer["digest"])  # it is there
    return OciImage(
        archive,
        digest,
        tuple(document["layers"]),
        dict(one.partition("=")[::2] for one in config.get("Env") or ()),
        config.get("WorkingDir") or "",
        config.get("Labels") or {},
    )


def _choose_manifest_digest(archive: Path, manifests: list[dict[str, Any]]) -> str:
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    for one in manifests:
        place = one.get("platform", {})
        if place.get("architecture", wanted) == wanted and place.get("os", "linux") == "linux":
            return str(one["digest"])
    raise _build_image_error(archive, f"there is no image for linux on {wanted} in it")


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
