"""Tables in documents are those of their sources, complete, and keep what they promise."""

from areal_hpc.recipe.reference import render_key_table
from tests.support.environments import CHECKOUT
from tests.support.generated_tables import TABLES
from tests.support.parity_table import DOCUMENT, shortcomings
from tests.support.slurm_events_table import EVENTS, read_results
from tests.support.tables import with_table


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


def test_no_event_of_slurm_is_unknown_and_none_lost_anything() -> None:
    events = read_results()["events"]
    assert events.keys() <= EVENTS.keys()
    for name, row in events.items():
        assert "duplicates=0 lost=0" in row["audit"], name


def test_every_layout_is_measured_and_within_its_bounds() -> None:
    assert shortcomings(DOCUMENT.read_text()) == []
