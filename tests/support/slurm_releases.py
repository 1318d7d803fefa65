"""The tests on Slurm, on one of its releases, and the table of docs/devcluster.md.

    python -m tests.support.slurm_releases RELEASE PART...

`RELEASE` is one of `PROVEN_RELEASES`; parts are the keys of `PARTS`. What came of each goes to
`benchmarks/results/slurm_releases.json` and the table, with the version that Slurm itself prints.
"""

import os
import re
import subprocess
import sys
import time
from typing import Any

from areal_hpc.slurm.versions import PROVEN_RELEASES
from slurm.devcluster.processes import get_search_path
from slurm.devcluster.roots import find_slurm_root, get_programs_dir
from tests.support.environments import CHECKOUT
from tests.support.results import read_results, write_results
from tests.support.tables import markdown, write_table

DOCUMENT = CHECKOUT / "docs" / "devcluster.md"
LOGS = CHECKOUT / ".nightly"
FAULTS = "tests/slurm/test_faults.py"
PARTS = {
    "suite": ("tests/slurm", f"--ignore={FAULTS}", "--numprocesses=2", "--dist=loadscope"),
    "faults": (FAULTS,),
    "events": ("tests/acceptance/test_slurm_events.py",),
    "learning": ("tests/acceptance/test_slurm_learning.py",),
}
"""Arguments of pytest."""


def run_part(release: str, part: str) -> bool:
    """Run one part on a release and record what came of it; whether all passed."""
    log = LOGS / f"slurm-{release}-{part}.log"
    log.parent.mkdir(exist_ok=True)
    environ = os.environ | {"TESTS_SLURM": release, "HYPOTHESIS_PROFILE": "thorough"}
    began_s = time.monotonic()
    with log.open("w") as output:
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", *PARTS[part]]
        code = subprocess.run(
            command, cwd=CHECKOUT, env=environ, stdout=output, stderr=output
        ).returncode
    said = log.read_text()
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", said[-400:])}
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", said, re.MULTILINE)
    figures = {
        "version": read_version(release),
        "passed": counts.get("passed", 0),
        "failed": sorted(set(failed)),
        "minutes": round((time.monotonic() - began_s) / 60, 1),
    }
    measured = read_results("slurm_releases", {})
    measured.setdefault(release, {})[part] = figures
    write_results(
        "slurm_releases", {one: measured[one] for one in PROVEN_RELEASES if one in measured}
    )
    write_table(DOCUMENT, "releases", table())
    return code == 0


def read_version(release: str) -> str:
    """What the release's Slurm calls itself."""
    root = find_slurm_root(release)
    path = f"{get_programs_dir(root)}:{get_search_path()}" if root else get_search_path()
    return subprocess.check_output(["slurmctld", "-V"], text=True, env={"PATH": path}).strip()


def table() -> str:
    """What ran on each release."""
    measured = read_results("slurm_releases", {})
    rows = [
        (release, read_versions(parts), *(describe(parts.get(part)) for part in PARTS))
        for release, parts in measured.items()
    ]
    return markdown(("release", "as Slurm prints it", *PARTS), rows)


def read_versions(parts: dict[str, Any]) -> str:
    return ", ".join(sorted({f"`{figures['version']}`" for figures in parts.values()}))


def describe(figures: dict[str, Any] | None) -> str:
    """What came of one part; a note is a person's."""
    if figures is None:
        return "not run"
    failed = ", ".join(f"`{name}`" for name in figures["failed"])
    said = f"{figures['passed']} passed" + (f", failed: {failed}" if failed else "")
    note = f"; {figures['note']}" if "note" in figures else ""
    return f"{said}; {figures['minutes']:g} min{note}"


def main() -> int:
    release, *parts = sys.argv[1:]
    passed = [run_part(release, part) for part in parts or PARTS]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
