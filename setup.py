"""What pyproject.toml cannot say: the version, and that a wheel has `recipes` and `examples`.

These stand in the folder `shipped` of the package, where `areal_hpc/checkout.py` looks for them.
The version is that of the newest tag, and a wheel's package says it.
"""

import re
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SHIPPED_FOLDERS = ("recipes", "examples")
SHIPPED_SUFFIXES = (".py", ".yaml", ".txt", ".jsonl")
VERSION_LINE = re.compile(r'^__version__ = "(.+)"', re.MULTILINE)
TAG_AND_COMMITS = re.compile(r"v(\d[\w.]*)-(\d+)-(g\w+)")


def read_version() -> str:
    """Return `0.1.0` at the tag v0.1.0, `0.1.0.post3+g1a2b3c4` three commits later.

    A source distribution has it in PKG-INFO. Without git or a tag it is that of the package.
    """
    if (ROOT / "PKG-INFO").exists():
        found = re.search(r"^Version: (.+)$", (ROOT / "PKG-INFO").read_text(), re.MULTILINE)
        if found:
            return found[1]
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ("git", "describe", "--tags", "--long", "--match", "v[0-9]*")
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
        if described := TAG_AND_COMMITS.match(said):
            version, commits, commit = described.groups()
            return version if commits == "0" else f"{version}.post{commits}+{commit}"
    found = VERSION_LINE.search((ROOT / "areal_hpc" / "__init__.py").read_text())
    assert found
    return found[1]


def list_shipped_files() -> list[Path]:
    """Paths of the files to add, relative to the repository. A linked folder would be a copy."""
    return [
        path.relative_to(ROOT)
        for folder in SHIPPED_FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SHIPPED_SUFFIXES
        and not any(part.is_symlink() for part in (path, *path.parents))
    ]


class BuildWithShippedFiles(build_py):
    """Builds the package and puts the shipped files into it; an editable install needs none."""

    def run(self) -> None:
        """See `build_py`."""
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "areal_hpc" / "__init__.py"
        line = f'__version__ = "{self.distribution.get_version()}"'
        package.write_text(VERSION_LINE.sub(line, package.read_text()))
        for path in list_shipped_files():
            target = Path(self.build_lib) / "areal_hpc" / "shipped" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, target)

    def get_source_files(self) -> list[str]:
        """See `build_py`: what a source distribution holds."""
        return [*super().get_source_files(), *map(str, list_shipped_files())]


setup(version=read_version(), cmdclass={"build_py": BuildWithShippedFiles})
