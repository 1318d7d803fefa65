"""The package's source files, each read once."""

from functools import cache

from tests.support.environments import CHECKOUT

PACKAGE = CHECKOUT / "areal_hpc"


@cache
def sources() -> dict[str, str]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in files}
