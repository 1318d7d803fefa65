"""What pyproject.toml cannot say: a wheel also has the repository's `recipes` and `examples`.

They stand in the folder `shipped` of the package, where `areal_hpc/checkout.py` looks for them.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SHIPPED_FOLDERS = ("recipes", "examples")
SHIPPED_SUFFIXES = (".py", ".yaml", ".txt", ".jsonl")


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
        for path in list_shipped_files():
            target = Path(self.build_lib) / "areal_hpc" / "shipped" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, target)

    def get_source_files(self) -> list[str]:
        """See `build_py`: what a source distribution holds."""
        return [*super().get_source_files(), *map(str, list_shipped_files())]


setup(cmdclass={"build_py": BuildWithShippedFiles})
