"""Folder into which untrusted tar archives are unpacked without writes outside it.

Links on the way to a file are followed as if the folder were the root. Files, folders and links are
written; devices, pipes, hard links to them, and the set-user-ID and set-group-ID bits are left
out. `tarfile` only reads: its own extraction filters could be bypassed (CVE-2025-4517).
"""

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from areal_hpc.sandbox.sandbox_files import remove_all

_WHITEOUT_PREFIX, _OPAQUE_NAME = ".wh.", ".wh..wh..opq"
"""File names in an image's layer that remove one file, or all that lower layers have there."""
_MAX_LINKS = 40
_FILE_MODE_BITS = 0o1777
_MAX_READ_BYTES = 4 << 20
_PIECE_BYTES = 1 << 20


class ArchiveTooLargeError(ValueError):
    """Error for an archive that exceeds a limit."""


class BoundedStream:
    """Stream for tarfile that ends after `max_bytes`.

    It refuses to read more than a few MiB at once: no valid header is as long. `can_go_back` allows
    seeking backward.
    """

    def __init__(self, stream: Any, max_bytes: int, *, can_go_back: bool = False) -> None:
        self._stream, self._max_bytes, self._position = stream, max_bytes, 0
        self._can_go_back = can_go_back

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        if self._can_go_back:
            self._position = self._stream.seek(position)
        if position < self._position:
            raise ValueError("its parts are not in their order")
        while self._position < position:
            if not self.read(min(_PIECE_BYTES, position - self._position)):
                return

    def read(self, size: int) -> bytes:
        if size > _MAX_READ_BYTES or self._position > self._max_bytes:
            raise ArchiveTooLargeError(
                f"it has a header of {size} bytes"
                if size > _MAX_READ_BYTES
                else f"it is longer than {self._max_bytes} bytes"
            )
        pieces = []
        while size and (piece := self._stream.read(size)):
            pieces.append(piece)
            size -= len(piece)
        self._position += sum(map(len, pieces))
        return b"".join(pieces)


class UnpackedTree:
    """Folder into which archives are unpacked.

    Args:
        folder: Its path.
        max_bytes: Total size of all files; a longer archive, or one with longer headers, is
            refused before more of it is read.
        max_files: Number of files, folders and links.
        skipped_folders: Folders at the top whose contents are left out.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        max_files: int,
        skipped_folders: tuple[str, ...] = (),
    ) -> None:
        self._root = str(folder.resolve()).rstrip("/")
        self._bytes_left, self._files_left = max_bytes, max_files
        self._skipped_folders = skipped_folders
        self._modes: dict[str, int] = {}
        self._links: set[str] = set()
        self._new: set[str] = set()
        self._left_out: set[str] = set()

    def write_archive(self, stream: Any, *, is_layer: bool = False) -> None:
        """Unpack a tar; the whiteout files of an image's layer remove files of lower layers."""
        self._new = set()
        # Each member has a few blocks of headers.
        max_bytes = 2 * self._bytes_left + 8192 * self._files_left
        bounded: Any = BoundedStream(stream, max_bytes)
        with tarfile.open(fileobj=bounded, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps them all
                self._files_left -= 1
                if self._files_left < 0:
                    raise ArchiveTooLargeError("it has too many files")
                self._apply_member(archive, member, is_layer)

    def apply_folder_modes(self) -> None:
        """Give folders their modes when all is written; their owner keeps all rights."""
        for path, mode in sorted(self._modes.items(), reverse=True):  # innermost first
            # Something later may have put a link in the place of the folder, or of one above it.
            if Path(path).is_dir() and os.path.realpath(path) == path:
                Path(path).chmod(mode & _FILE_MODE_BITS | 0o700)

    def remove_links_leading_out(self) -> int:
        """Remove links that lead out of the folder at any point, and return their number."""
        # Something later may have taken the place of a link, or of a folder above it.
        links = {
            path
            for path in self._links
            if Path(path).is_symlink()
            and os.path.realpath(Path(path).parent) == str(Path(path).parent)
        }
        n_links = len(links)
        while leading_out := {path for path in links if self._leads_out(path)}:
            for path in leading_out:  # other links may have led through it
                Path(path).unlink()
            links -= leading_out
        return n_links - len(links)

    def _apply_member(
        self, archive: tarfile.TarFile, tar_member: tarfile.TarInfo, is_layer: bool
    ) -> None:
        parts = [part for part in PurePosixPath("/", tar_member.name).parts[1:] if part != "."]
        if not parts or self._is_below_skipped_folder(parts):
            return
        name = parts[-1].removeprefix(_WHITEOUT_PREFIX) if is_layer else parts[-1]
        if name in ("", ".", ".."):
            raise ValueError(f"there is a file {tar_member.name}")
        folder = self._make_folder(parts[:-1])
        if is_layer and parts[-1] == _OPAQUE_NAME:
            self._remove_entries_of_lower_layers(folder)
        elif is_layer and name != parts[-1]:
            remove_all(f"{folder}/{name}")
        else:
            self._write_member(archive, tar_member, f"{folder}/{name}")

    def _write_member(
        self, archive: tarfile.TarFile, tar_member: tarfile.TarInfo, path: str
    ) -> None:
        self._new.add(path)
        self._left_out.discard(path)
        if tar_member.isdir():
            if Path(path).is_symlink() or not Path(path).is_dir():
                remove_all(path)
                Path(path).mkdir()
            self._modes[path] = tar_member.mode
            return
        if tar_member.islnk():
            self._hard_link_member(tar_member, path)
            return
        remove_all(path)
        if not (tar_member.isfile() or tar_member.issym()):
            self._left_out.add(path)
            return
        if tar_member.issym():
            Path(path).symlink_to(tar_member.linkname)
            self._links.add(path)
        else:
            self._write_file(archive, tar_member, path)
        try:
            os.utime(path, (tar_member.mtime, tar_member.mtime), follow_symlinks=False)
        except (OverflowError, ValueError) as error:
            raise ValueError(f"{tar_member.name} has no time: {tar_member.mtime}") from error

    def _write_file(self, archive: tarfile.TarFile, tar_member: tarfile.TarInfo, path: str) -> None:
        content = archive.extractfile(tar_member)
        assert content is not None
        if tar_member.issparse():  # its file may be longer than its `size`
            raise ValueError(f"{tar_member.name} is a sparse file: write it as a whole one")
        self._bytes_left -= tar_member.size
        if self._bytes_left < 0:
            raise ArchiveTooLargeError("its files are too large")
        with Path(path).open("xb") as file:
            shutil.copyfileobj(content, file, _PIECE_BYTES)
        Path(path).chmod(tar_member.mode & _FILE_MODE_BITS)

    def _hard_link_member(self, tar_member: tarfile.TarInfo, path: str) -> None:
        *folders, name = PurePosixPath("/", tar_member.linkname).parts[1:] or [""]
        if name in ("", ".."):
            raise ValueError(f"{tar_member.name} is a hard link to {tar_member.linkname!r}")
        source = f"{self._make_folder(folders)}/{name}"
        if source == path:
            return
        remove_all(path)
        if source in self._left_out or self._is_below_skipped_folder([*folders, name]):
            self._left_out.add(path)
        elif not os.path.lexists(source):
            raise ValueError(
                f"{tar_member.name} is a hard link to {tar_member.linkname}, which is missing"
            )
        else:
            os.link(source, path, follow_symlinks=False)
            if source in self._links:
                self._links.add(path)

    def _make_folder(self, path_parts: list[str]) -> str:
        folder = self._follow_links(path_parts, makes_folders=True)
        if folder is None:
            raise ValueError(f"too many links at {'/'.join(path_parts)}")
        return folder

    def _leads_out(self, link: str) -> bool:
        parts = PurePosixPath(link.removeprefix(self._root)).parts[1:]
        return self._follow_links([*parts], makes_folders=False) is None

    def _follow_links(self, path_parts: list[str], *, makes_folders: bool) -> str | None:
        """Resolve a path, and return None if it has too many links.

        With `makes_folders` the folder counts as the root; else a path that leads out gives None.
        """
        resolved, pending, links = list[str](), list(reversed(path_parts)), 0
        while pending:
            part = pending.pop()
            path = "/".join([self._root, *resolved, part])
            if part == "/" or (part == ".." and not resolved):
                if not makes_folders:
                    return None
                resolved.clear()
            elif part == "..":
                resolved.pop()
            elif Path(path).is_symlink():
                links += 1
                if links > _MAX_LINKS:
                    return None
                pending += reversed(PurePosixPath(Path(path).readlink()).parts)
            elif part != ".":
                if makes_folders and not Path(path).is_dir():
                    remove_all(path)
                    Path(path).mkdir()
                if makes_folders:
                    self._new.add(path)
                resolved.append(part)
        return "/".join([self._root, *resolved])

    def _remove_entries_of_lower_layers(self, folder: str) -> None:
        for entry in os.scandir(folder):
            if entry.path not in self._new:
                remove_all(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                self._remove_entries_of_lower_layers(entry.path)

    def _is_below_skipped_folder(self, path_parts: list[str]) -> bool:
        return path_parts[0] in self._skipped_folders and len(path_parts) > 1
