"""Where this package stands: in a checkout of its repository, or installed from a wheel."""

from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent
EXTRAS = ("serve", "main", "camel")
"""Extras of the package, each with the packages of one environment of that name."""


def find_checkout() -> Path | None:
    root = PACKAGE_DIR.parent
    return root if (root / "scripts" / "setup.sh").is_file() else None


def get_shipped_dir() -> Path:
    """The folder with the `recipes` and `examples` that ship with the package.

    In a checkout it is the checkout. In a wheel it is inside the package: `setup.py` fills it.
    """
    return find_checkout() or PACKAGE_DIR / "shipped"


def format_install_command(environment: str) -> str:
    """The command that makes one of the environments `serve`, `main` and `camel`."""
    if environment not in EXTRAS:
        raise ValueError(f"expected one of {', '.join(EXTRAS)}, got {environment!r}")
    if find_checkout() is None:
        return f'pip install "areal-hpc[{environment}]"'
    # `make setup` makes the two that every run needs.
    return f"scripts/setup.sh {environment}" if environment == "camel" else "make setup"


def format_python_hint(python: str, environment: str) -> str:
    """The command that makes an interpreter which is missing or lacks a package.

    It is that of the environment which the role has, unless the path is `.venvs/camel/bin/python`:
    CAMEL's agents have one of their own.
    """
    is_camel = Path(python).parent.parent.name == "camel"
    return format_install_command("camel" if is_camel else environment)


def format_missing_module_hint(module: str, installed_where: str) -> str:
    if module == "examples":
        return "areal-hpc init DIR --like RECIPE copies a shipped recipe with its code"
    return f"start the run from the folder that holds the package, or install it {installed_where}"
