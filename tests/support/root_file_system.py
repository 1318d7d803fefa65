"""A small root file system: a shell and a few programs of this machine, with their libraries."""

import os
import re
import shutil
import subprocess
from pathlib import Path

PROGRAMS = ("sh", "cat", "chmod", "ls", "mkdir", "rm", "sleep", "touch")
_NOBODY_UID = 65534


def make_root_file_system(folder: Path) -> Path:
    """Fill a folder. It belongs to the sandboxes' user: to nobody, if root decides."""
    for name in ("bin", "etc", "usr", "proc", "dev", "tmp", "data/old"):
        (folder / name).mkdir(parents=True)
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program
        _copy(Path(program), folder / "bin" / name)
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True)
        for library in re.findall(r"(/\S+) \(0x", listed.stdout):
            _copy(Path(library), folder / library.lstrip("/"))
    (folder / "etc/os-release").write_text("NAME=small\n")
    (folder / "data/old/kept").write_text("kept\n")
    (folder / "data/old/gone").write_text("gone\n")
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, _NOBODY_UID, _NOBODY_UID, follow_symlinks=False)
        for parent in folder.parents[:3]:  # pytest's own are closed to others
            parent.chmod(parent.stat().st_mode | 0o055)
    return folder


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
