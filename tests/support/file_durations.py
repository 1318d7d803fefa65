"""Seconds that each file of tests took, for the order and the progress of a whole run.

`make durations` runs the tests and writes the table anew. A file that is not in it counts as one of
its tier.
"""

import json
from functools import cache
from pathlib import Path
from statistics import mean

TABLE = Path(__file__).parents[1] / "durations.json"
UNKNOWN_TIER_S = 10.0
SHARED_FOLDERS = ("tests/integration/agents/", "tests/integration/proxy/")
"""Folders whose files share servers with a long start, so that one worker runs all of one."""


def get_group(test: str) -> str:
    """Name the group that one worker runs: a test's file, or the folder of a shared server."""
    file = test.partition("::")[0]
    return next((folder for folder in SHARED_FOLDERS if file.startswith(folder)), file)


@cache
def read_table() -> dict[str, float]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


@cache
def estimate_s(file: str) -> float:
    """Seconds that a file of tests takes on a quiet machine of two cores."""
    table = read_table()
    if file in table:
        return table[file]
    tier = "/".join(file.split("/")[:2])
    return mean([s for name, s in table.items() if name.startswith(f"{tier}/")] or [UNKNOWN_TIER_S])


def write_table(durations_s: dict[str, float]) -> None:
    """Write the table; files that did not run keep their earlier times."""
    kept = {name: s for name, s in read_table().items() if (TABLE.parents[1] / name).exists()}
    table = {**kept, **{name: round(s, 1) for name, s in durations_s.items()}}
    TABLE.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
