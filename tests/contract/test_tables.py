"""Tables in documents are those of their sources, complete, and keep what they promise."""

from areal_hpc.recipe.reference import render_key_table
from tests.support.environments import CHECKOUT
from tests.support.generated_tables import TABLES
from tests.support.results import with_table


def test_generated_tables_are_those_of_today() -> None:
    """If not: `python -m tests.support.generated_tables`, `areal-hpc recipe-keys`."""
    stale = []
    for (document, name), render in TABLES.items():
        path = CHECKOUT / "docs" / document
        if path.read_text() != with_table(path, name, render()):
            stale.append((document, name))
    assert stale == []
    reference = (CHECKOUT / "docs" / "recipe.md").read_text()
    assert reference == render_key_table()
    assert "| None |" not in reference
