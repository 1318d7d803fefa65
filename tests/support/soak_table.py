"""Table of the soak in `docs/operating.md`: what kills of each role cost, over all parts."""

import re
import statistics
from collections import defaultdict
from typing import Any

from tests.support.results import read_results
from tests.support.tables import markdown


def table() -> str:
    """By role; the last row is that of all kills."""
    parts: list[dict[str, Any]] = read_results("soak", {}).get("parts", [])
    lost_s: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for role, seconds in part["seconds_lost"].items():
            lost_s[role] += seconds
    rows = [(f"`{role}`", *_summarize(lost_s[role])) for role in sorted(lost_s)]
    rows.append(("all", *_summarize([one for seconds in lost_s.values() for one in seconds])))
    header = ("killed", "times", "median seconds lost", "most seconds lost")
    totals = {
        name: sum(int(re.findall(rf"{name}=(\d+)", part["audit"])[0]) for part in parts)
        for name in ("trained_once", "lost", "duplicates")
    }
    kills = sum(map(len, lost_s.values()))
    steps, launches = (sum(part[name] for part in parts) for name in ("steps", "launches"))
    said = (
        f"So far {kills} kills in {len(parts)} part{'s' * (len(parts) != 1)}, {steps} steps; the "
        f"command was given {launches} times: {totals['trained_once']} tickets trained once, "
        f"{totals['lost']} lost, {totals['duplicates']} trained twice."
    )
    return f"{said}\n\n{markdown(header, rows)}"


def _summarize(seconds: list[float]) -> tuple[int, str, str]:
    if not seconds:
        return 0, "", ""
    return len(seconds), f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"
