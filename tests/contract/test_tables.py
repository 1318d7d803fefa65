"""docs/parity.md covers every layout and family, and keeps what it promises."""

from __future__ import annotations

from tests.support.parity_table import DOCUMENT, shortcomings


def test_every_layout_is_measured_and_within_its_bounds() -> None:
    assert shortcomings(DOCUMENT.read_text()) == []


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
