"""Location of this package, in a checkout of its repository or installed from a wheel."""

from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent
EXTRAS = ("serve", "main", "camel")
"""Extras of the package; each installs the packages of the environment of that name."""


def find_checkout() -> Path | None:
    root = PACKAGE_DIR.parent
    return root if (root / "scripts" / "setup.sh").is_file() else None


def get_shipped_dir() -> Path:
    """Return the folder with the `recipes` and `examples` that ship with the package.

    It is the checkout, or a folder inside an installed package, which `setup.py` fills.
    """
    return find_checkout() or PACKAGE_DIR / "shipped"


def format_install_command(environment: str) -> str:
    """Format the command that makes one of the environments `serve`, `main` and `camel`."""
    if environment not in EXTRAS:
        raise ValueError(f"expected one of {', '.join(EXTRAS)}, got {environment!r}")
    if find_checkout() is None:
        return f'pip install "areal-hpc[{environment}]"'
    # `make setup` makes both environments that every run needs.
    return f"scripts/setup.sh {environment}" if environment == "camel" else "make setup"


def format_python_hint(python: str, environment: str) -> str:
    """Format the command that makes an interpreter which is missing or lacks a package.

    The command makes the role's `environment`, unless the path is `.venvs/camel/bin/python`:
    CAMEL's agents have an environment of their own.
    """
    is_camel = Path(python).parent.parent.name == "camel"
    return format_install_command("camel" if is_camel else environment)


def format_missing_module_hint(module: str, installed_where: str) -> str:
    if module == "examples":
        return "areal-hpc init DIR --like RECIPE copies a shipped recipe with its code"
    return f"start the run from the folder that holds the package, or install it {installed_where}"
