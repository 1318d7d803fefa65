"""The tables of docs/operating.md are those of the figures, and leave no event out."""

from __future__ import annotations

from tests.support.slurm_events_table import DOCUMENT, EVENTS, read_results, renewed


def test_the_tables_are_those_of_the_figures() -> None:
    text = DOCUMENT.read_text()
    assert text == renewed(text), "renew them: python -m tests.support.slurm_events_table"


def test_no_event_is_unknown_and_none_lost_anything() -> None:
    events = read_results()["events"]
    assert events.keys() <= EVENTS.keys()
    for name, row in events.items():
        assert "duplicates=0 lost=0" in row["audit"], name
