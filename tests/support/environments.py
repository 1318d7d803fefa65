"""The checkout and the interpreters of its environments."""

from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def python_of(environment: str) -> Path:
    """The interpreter of an environment that scripts/setup.sh makes."""
    return CHECKOUT / ".venvs" / environment / "bin" / "python"
