"""Tables in documents are those of their sources, complete, and keep what they promise."""

import re

import pytest

from tests.support.environments import CHECKOUT
from tests.support.generated_tables import TABLES
from tests.support.parity_table import (
    DOCUMENT,
    GRADIENT_BOUND,
    LOGPROB_BOUND,
    NORM_BOUND,
    RESUME_BOUND,
    shortcomings,
)
from tests.support.slurm_events_table import EVENTS, read_results
from tests.support.tables import with_table


@pytest.mark.parametrize(("document", "name"), TABLES)
def test_a_generated_table_is_that_of_today(document: str, name: str) -> None:
    path = CHECKOUT / "docs" / document
    expected = with_table(path, name, TABLES[document, name]())
    assert path.read_text() == expected, "renew it: python -m tests.support.generated_tables"


def test_no_event_of_slurm_is_unknown_and_none_lost_anything() -> None:
    events = read_results()["events"]
    assert events.keys() <= EVENTS.keys()
    for name, row in events.items():
        assert "duplicates=0 lost=0" in row["audit"], name


def test_every_layout_is_measured_and_within_its_bounds() -> None:
    assert shortcomings(DOCUMENT.read_text()) == []


def test_the_document_names_the_bounds() -> None:
    named = re.findall(r"^\| [a-z, -]+ \| .+ \| (\d\S+) \|$", DOCUMENT.read_text(), re.M)[:4]
    assert [float(bound) for bound in named] == [
        *(LOGPROB_BOUND, GRADIENT_BOUND, NORM_BOUND, RESUME_BOUND)
    ]


def test_a_missing_row_is_noticed() -> None:
    lines = DOCUMENT.read_text().splitlines()
    rows = [line for line in lines if line.startswith(("| qwen", "| llama"))]
    for row in rows:
        without = "\n".join(line for line in lines if line != row) + "\n"
        assert len(shortcomings(without)) == 1, row


def test_a_figure_beyond_its_bound_is_noticed() -> None:
    document = DOCUMENT.read_text()
    rows = [line for line in document.splitlines() if line.startswith(("| qwen", "| llama"))]
    for row in rows:
        for place in (-4, -3, -2) if row.count("|") == 6 else ():
            cells = row.split("|")
            if not cells[place].strip()[0].isdigit() or "e" not in cells[place]:
                continue
            for worse in (" 2.0e-04 ", " nan "):
                changed = "|".join([*cells[:place], worse, *cells[place + 1 :]])
                assert len(shortcomings(document.replace(row, changed))) == 1, changed
