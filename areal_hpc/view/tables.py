"""Text tables, durations and clock times."""

import time
from collections.abc import Container, Sequence


def format_table(
    rows: Sequence[Sequence[str]], right_aligned_columns: Container[int] = ()
) -> list[str]:
    """Rows of one length as lines, every column as wide as its longest cell.

    Columns with an index in `right_aligned_columns` are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right_aligned_columns else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_duration(seconds: float) -> str:
    """A length of time in its two largest units: `45 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 2 * 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def format_time(unix_s: float) -> str:
    then, today = time.localtime(unix_s), time.localtime()
    form = "%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M:%S"
    return time.strftime(form, then)
