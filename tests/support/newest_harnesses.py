"""`make harnesses-newest`: the newest release of each harness in the scene of the acceptance test.

It is installed from its registry, without a lock, into `.venvs/harnesses-newest`. What was seen
goes to `benchmarks/results/harnesses_newest.json` and into the table of docs/harnesses.md.
Arguments are names of harnesses, to try these alone.
"""

import os
import re
import subprocess
import sys
from datetime import UTC, datetime

from areal_hpc.agents.harness.installation import install_harness, query_newest_version
from areal_hpc.agents.harness.programs import HARNESSES
from areal_hpc.errors import ClusterError
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.results import add_results, read_results
from tests.support.tables import markdown, write_table

NEWEST_DIR = CHECKOUT / ".venvs" / "harnesses-newest"
HARNESSES_DIR_VARIABLE = "AREAL_HPC_TEST_HARNESSES_DIR"
"""Where the acceptance test looks for harnesses instead of their own folder."""
RESULTS = "harnesses_newest"
SCENE = (
    "tests/acceptance/test_harnesses.py::"
    "test_a_harness_reads_runs_and_edits_and_all_of_it_is_recorded"
)
PLAY_TIMEOUT_S = 1200.0
AS_LOCKED = "as locked"
"""The newest release is the one of the lock, which the acceptance test plays."""


def try_newest(name: str) -> dict[str, str]:
    """What became of the newest release of a harness."""
    found = {"date": datetime.now(UTC).date().isoformat(), "locked": HARNESSES[name].version}
    try:
        found["newest"] = query_newest_version(name)
        if found["newest"] == found["locked"]:
            return found | {"outcome": AS_LOCKED}
        install_harness(name, NEWEST_DIR, found["newest"])
    except ClusterError as error:
        missing = re.search(r"No matching [a-z ]+ for [^\s]*[^\s.]", str(error))
        why = missing.group() if missing else str(error)[:300]
        return {"newest": "?"} | found | {"outcome": f"not installed: {why}"}
    return found | {"outcome": play(name)}


def play(name: str) -> str:
    """The scene with the newest release: `passes`, or the first line of what was wrong."""
    played = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", f"{SCENE}[{name}]"],
        cwd=CHECKOUT,
        env={**os.environ, HARNESSES_DIR_VARIABLE: str(NEWEST_DIR)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(PLAY_TIMEOUT_S),
    )
    if played.returncode == 0:
        return "passes"
    print(played.stdout, played.stderr, sep="\n", file=sys.stderr)
    wrong = [line for line in played.stdout.splitlines() if line.startswith("E ")]
    return f"fails: {wrong[0][1:].strip() if wrong else played.stdout[-200:]}"[:300]


def render_table() -> str:
    """The table of docs/harnesses.md."""
    measured = read_results(RESULTS, {})
    rows = [
        (f"`{name}`", one["locked"], one["newest"], one["date"], one["outcome"].replace("|", "/"))
        for name in HARNESSES
        if (one := measured.get(name))
    ]
    return markdown(("harness", "locked", "newest", "tried on", "outcome"), rows)


def main(names: list[str]) -> int:
    """Try them one by one; 1 if one does not pass."""
    failed = 0
    for name in names or list(HARNESSES):
        found = try_newest(name)
        failed += found["outcome"] not in (AS_LOCKED, "passes")
        print(f"{name}: {found['newest']} {found['outcome']}", flush=True)
        add_results(RESULTS, **{name: found})
        write_table(CHECKOUT / "docs" / "harnesses.md", "newest", render_table())
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
