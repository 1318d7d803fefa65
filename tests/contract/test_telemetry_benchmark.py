"""What `areal-hpc bench telemetry` leaves out on its other side: the names are in the package."""

import ast

import pytest

from benchmarks.without_telemetry.sitecustomize import REPLACEMENTS
from tests.support.environments import CHECKOUT

NAMES = [(module, path) for module, paths in REPLACEMENTS.items() for path in paths]
NAMES += [("areal_hpc.trainer.learner", "run_forward_backward")]  # called without the entropy


@pytest.mark.parametrize(("module", "path"), NAMES)
def test_every_name_that_is_replaced_exists(module: str, path: str) -> None:
    body = ast.parse((CHECKOUT / f"{module.replace('.', '/')}.py").read_text()).body
    *owner, name = path.split(".")
    if owner:
        (body,) = (
            one.body for one in body if isinstance(one, ast.ClassDef) and [one.name] == owner
        )
    assert name in {found for statement in body for found in names_bound_by(statement)}


def names_bound_by(statement: ast.stmt) -> set[str]:
    """Names that a class, a function or an import binds."""
    if isinstance(statement, ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    return {statement.name} if hasattr(statement, "name") else set()
