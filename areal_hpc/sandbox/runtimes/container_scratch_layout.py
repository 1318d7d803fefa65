"""Files that a container program starts a sandbox from, in memory, limited in size and number.

They lie in the scratch folder, which `container_start.py` covers with a file system of its own:
`rootfs`, what is shown in it (`guest`, `dev`), what commands may write (`workspace`, `tmp`, `shm`,
one for each further folder), or what a root file system is written over with (`upper`, `work`).
"""

import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from areal_hpc.errors import RecipeError
from areal_hpc.sandbox.bubblewrap_command_line import SYSTEM_FILES, SYSTEM_LINKS
from areal_hpc.sandbox.runtime import ISOLATION_RECIPE_KEY
from areal_hpc.sandbox.runtimes.guest_environment import GUEST_ETC_FILES, WORK_DIR
from areal_hpc.sandbox.runtimes.guest_python import GUEST_DIR, SERVER_SCRIPTS, GuestPython
from areal_hpc.sandbox.spec import SandboxSpec

_SCRATCH_FOLDERS = (
    "rootfs",
    "upper",
    "work",
    "guest",
    "guest/root",
    "places",
    "dev",
    "storage",
    "run",
)


def list_writable_folders(spec: SandboxSpec) -> list[str]:
    return ["/"] if spec.root is not None else [WORK_DIR, "/tmp", *spec.writable_folders]


def list_writable_binds(spec: SandboxSpec) -> Iterator[tuple[str, str]]:
    """Names below the scratch folder that are shown to be written in, and where."""
    yield "shm", "/dev/shm"
    if spec.root is None:
        yield from (("workspace", WORK_DIR), ("tmp", "/tmp"))
        for number, folder in enumerate(spec.writable_folders):
            yield f"folder{number}", folder


def list_machine_binds(spec: SandboxSpec, python: GuestPython) -> Iterator[tuple[str, str]]:
    """What a sandbox shows of this machine, read-only, and where."""
    yield from python.binds
    for folder in spec.readonly_folders:
        yield folder, folder
    if spec.root is not None:
        return
    yield "/usr", "/usr"
    shared = ("/etc/ssl", "/etc/pki") if spec.network == "open" else ()
    for name in (*SYSTEM_LINKS, *SYSTEM_FILES, *shared):
        if Path(name).exists() and not (name in SYSTEM_LINKS and Path(name).is_symlink()):
            yield os.path.realpath(name), name


def raise_if_path_has_separator(program: str, paths: Iterable[str], separators: str) -> None:
    """Refuse paths that a command line with `SOURCE:PLACE` cannot tell apart.

    Raises:
        RecipeError: A path has one of `separators`.
    """
    for path in paths:
        if any(one in path for one in separators):
            raise RecipeError(
                f"{program} cannot show {path}: expected a path without any of {separators!r}, at "
                "which its command line is split",
                key=ISOLATION_RECIPE_KEY,
                hint="name a path without them, or set rollout.agent.isolation=bwrap",
            )


def build_scratch_archive(
    spec: SandboxSpec,
    binds: Sequence[tuple[str, str]],
    files: Mapping[str, bytes],
    links: Mapping[str, str],
) -> bytes:
    """A tar of what the scratch folder holds at first, `files` and `links` by name among it."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in _SCRATCH_FOLDERS:
            _add_member(archive, name)
        for name in (
            "shm",
            "tmp",
            "workspace",
            *(f"folder{n}" for n in range(len(spec.writable_folders))),
        ):
            _add_member(archive, name, folder_mode=0o1777)
        shown_in = "rootfs" if spec.root is None else "places"
        for place in ("/proc", "/sys", "/dev"):
            _add_member(archive, f"{shown_in}{place}")
        for place in (GUEST_DIR, WORK_DIR, "/tmp", *spec.writable_folders):
            _add_member(archive, f"{shown_in}{place}", folder_mode=0o1777)
        for source, place in binds:
            is_guests = place.startswith(f"{GUEST_DIR}/")
            name = place.replace(GUEST_DIR, "guest", 1) if is_guests else f"{shown_in}{place}"
            _add_member(archive, name, b"" if Path(source).is_file() else None)
        for path in map(Path, SYSTEM_LINKS if spec.root is None else ()):
            if path.is_symlink():
                _add_member(archive, f"rootfs{path}", target=str(path.readlink()))
        for script in SERVER_SCRIPTS:
            _add_member(archive, f"guest/{script.name}", script.read_bytes())
        for name, content in GUEST_ETC_FILES.items() if spec.root is None else ():
            _add_member(archive, f"rootfs/etc/{name}", content.encode())
        for name, data in files.items():
            _add_member(archive, name, data)
        for name, target in links.items():
            _add_member(archive, name, target=target)
    return stream.getvalue()


def _add_member(
    archive: tarfile.TarFile,
    member_path: str,
    content: bytes | None = None,
    *,
    folder_mode: int = 0o755,
    target: str = "",
) -> None:
    member = tarfile.TarInfo(member_path)
    member.mode = folder_mode if content is None else 0o644
    member.type = tarfile.SYMTYPE if target else tarfile.DIRTYPE
    member.linkname = target
    if content is not None:
        member.type, member.size = tarfile.REGTYPE, len(content)
    archive.addfile(member, io.BytesIO(content or b""))
