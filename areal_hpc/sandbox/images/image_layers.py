"""Layers of an image, applied one on top of the other in a folder of this machine.

An image is not trusted to stay in its folder: links in it are followed as if the folder were the
root. Devices are left out with the hard links to them, and so are the set-user-ID and set-group-ID
bits.
"""

import contextlib
import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath

_WHITEOUT_PREFIX, _OPAQUE_NAME = ".wh.", ".wh..wh..opq"
_SKIPPED_FOLDERS = ("dev", "proc", "sys")
"""A sandbox has its own; nothing in them is kept."""
_MAX_LINKS = 40
_FILE_MODE_BITS = 0o1777


class RootTree:
    """A root file system that grows by layers."""

    def __init__(self, folder: Path) -> None:
        self._root = str(folder.resolve())
        self._modes: dict[str, int] = {}
        self._new: set[str] = set()
        self._left_out: set[str] = set()

    def apply_layer(self, layer: tarfile.TarFile) -> None:
        """Write and remove what a layer says.

        Raises:
            ValueError: A name leads nowhere.
            OSError: A file cannot be written.
        """
        self._new = set()
        for member in layer:
            parts = [one for one in PurePosixPath("/", member.name).parts[1:] if one != "."]
            if not parts or _is_below_skipped_folder(parts):
                continue
            if parts[-1].removeprefix(_WHITEOUT_PREFIX) in ("", ".", ".."):
                raise ValueError(f"there is a file {member.name}")
            folder = self._resolve_and_make_folder(parts[:-1])
            if parts[-1] == _OPAQUE_NAME:
                self._remove_entries_of_lower_layers(folder)
            elif parts[-1].startswith(_WHITEOUT_PREFIX):
                _remove(f"{folder}/{parts[-1].removeprefix(_WHITEOUT_PREFIX)}")
            else:
                self._write_member(layer, member, f"{folder}/{parts[-1]}")

    def apply_recorded_folder_modes(self) -> None:
        """Give folders their modes, now that all is written; their owner may always write."""
        for path, mode in self._modes.items():
            # A later layer may have a link in the place of the folder, or of one above it.
            if Path(path).is_dir() and os.path.realpath(path) == path:
                Path(path).chmod(mode & _FILE_MODE_BITS | 0o700)

    def _write_member(self, layer: tarfile.TarFile, tar_member: tarfile.TarInfo, path: str) -> None:
        self._new.add(path)
        self._left_out.discard(path)
        if tar_member.isdir():
            if not Path(path).is_dir() or Path(path).is_symlink():
                _remove(path)
                Path(path).mkdir()
            self._modes[path] = tar_member.mode
            return
        if tar_member.islnk():
            self._hard_link_member(tar_member, path)
            return
        _remove(path)
        if not (tar_member.isfile() or tar_member.issym()):
            self._left_out.add(path)
            return
        if tar_member.issym():
            Path(path).symlink_to(tar_member.linkname)
        else:
            content = layer.extractfile(tar_member)
            assert content is not None
            with Path(path).open("xb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
            Path(path).chmod(tar_member.mode & _FILE_MODE_BITS)
        os.utime(path, (tar_member.mtime, tar_member.mtime), follow_symlinks=False)

    def _hard_link_member(self, tar_member: tarfile.TarInfo, path: str) -> None:
        """Make a hard link, unless what it links to was left out."""
        *folders, name = PurePosixPath("/", tar_member.linkname).parts[1:]
        source = f"{self._resolve_and_make_folder(folders)}/{name}"
        if source == path:
            return
        _remove(path)
        if source in self._left_out or _is_below_skipped_folder([*folders, name]):
            self._left_out.add(path)
        elif not os.path.lexists(source):
            raise ValueError(
                f"{tar_member.name} is a hard link to {tar_member.linkname}, which is missing"
            )
        else:
            os.link(source, path, follow_symlinks=False)

    def _resolve_and_make_folder(self, path_parts: list[str]) -> str:
        """The folder of this machine that a path in the image means; it is made."""
        place, pending, links = list[str](), list(reversed(path_parts)), 0
        while pending:
            part = pending.pop()
            if part in ("..", ".", "/"):
                place = place[:-1] if part == ".." else [] if part == "/" else place
                continue
            path = "/".join([self._root, *place, part])
            if Path(path).is_symlink():
                links += 1
                if links > _MAX_LINKS:
                    raise ValueError(f"too many links at {'/'.join(path_parts)}")
                pending += reversed(PurePosixPath(Path(path).readlink()).parts)
                continue
            if not Path(path).is_dir():
                _remove(path)
                Path(path).mkdir()
            place.append(part)
        return "/".join([self._root, *place])

    def _remove_entries_of_lower_layers(self, folder: str) -> None:
        """Remove of a folder what lower layers have put there."""
        for entry in os.scandir(folder):
            if entry.path not in self._new:
                _remove(entry.path)


def _is_below_skipped_folder(path_parts: list[str]) -> bool:
    return path_parts[0] in _SKIPPED_FOLDERS and len(path_parts) > 1


def _remove(path: str) -> None:
    """Remove a file or a folder, if there is one."""
    if Path(path).is_dir() and not Path(path).is_symlink():
        shutil.rmtree(path)
        return
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
