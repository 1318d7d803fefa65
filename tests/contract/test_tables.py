"""Tables in documents are those of their sources, complete, and keep what they promise."""

import re

import pytest

from areal_hpc.recipe.reference import render_key_table
from tests.support.environments import CHECKOUT
from tests.support.generated_tables import TABLES
from tests.support.parity_table import BOUNDS, DOCUMENT, shortcomings
from tests.support.slurm_events_table import EVENTS, read_results
from tests.support.tables import with_table


@pytest.mark.parametrize(("document", "name"), TABLES)
def test_a_generated_table_is_that_of_today(document: str, name: str) -> None:
    path = CHECKOUT / "docs" / document
    expected = with_table(path, name, TABLES[document, name]())
    assert path.read_text() == expected, "renew it: python -m tests.support.generated_tables"


def test_the_reference_of_a_recipes_keys_is_that_of_today_and_says_what_each_is() -> None:
    reference = (CHECKOUT / "docs" / "recipe.md").read_text()
    assert reference == render_key_table(), "run: areal-hpc recipe-keys > docs/recipe.md"
    assert "| None |" not in reference


def test_no_event_of_slurm_is_unknown_and_none_lost_anything() -> None:
    events = read_results()["events"]
    assert events.keys() <= EVENTS.keys()
    for name, row in events.items():
        assert "duplicates=0 lost=0" in row["audit"], name


def test_every_layout_is_measured_and_within_its_bounds() -> None:
    assert shortcomings(DOCUMENT.read_text()) == []


def test_the_document_names_the_bounds() -> None:
    named = re.findall(r"^\| [a-z, -]+ \| .+ \| (\d\S+) \|$", DOCUMENT.read_text(), re.M)[:4]
    bounds = [*BOUNDS["agreements"].values(), BOUNDS["resumes"]["loss"]]
    assert [float(bound) for bound in named] == bounds


ROWS = [
    line for line in DOCUMENT.read_text().splitlines() if line.startswith(("| qwen", "| llama"))
]


@pytest.mark.parametrize("row", ROWS)
def test_a_missing_row_and_a_figure_beyond_its_bound_are_noticed(row: str) -> None:
    document = DOCUMENT.read_text()
    assert len(shortcomings(document.replace(f"{row}\n", ""))) == 1
    cells = row.split("|")
    for place in (-4, -3, -2) if len(cells) == 7 else ():
        if cells[place].strip()[0].isdigit() and "e" in cells[place]:
            for worse in (" 2.0e-04 ", " nan "):
                changed = "|".join([*cells[:place], worse, *cells[place + 1 :]])
                assert len(shortcomings(document.replace(row, changed))) == 1, changed
