"""The checkout: its package's sources, its environments and the packages in its locks."""

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
PACKAGE = CHECKOUT / "areal_hpc"


@cache
def sources() -> dict[str, str]:
    """The package's files, each read once."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in files}


def python_of(environment: str) -> Path:
    return CHECKOUT / ".venvs" / environment / "bin" / "python"


def find_uv() -> str:
    """Find the uv of scripts/setup.sh: that on the PATH, else the fetched one."""
    fetched = CHECKOUT / ".venvs" / "uv" / "bin"
    program = shutil.which("uv", path=f"{os.environ['PATH']}:{fetched}")
    assert program
    return program


def export_lock(*options: str) -> dict[str, str]:
    command = [find_uv(), "export", "--frozen", "--quiet", "--no-emit-project", *options]
    exported = subprocess.run(command, cwd=CHECKOUT, check=True, stdout=subprocess.PIPE, text=True)
    return read_pins(exported.stdout)


def read_pins(lock: str) -> dict[str, str]:
    """Package -> version of the text of a requirements file."""
    pins = re.findall(r"^([^#\s]\S*)==(\S+)", lock, re.MULTILINE)
    return {normalize_name(name): version for name, version in pins}


def normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
