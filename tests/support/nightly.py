"""The long proofs, an hour a call: each call goes on where the last one stopped.

    python -m tests.support.nightly [--minutes 60] [--again]

A file of tests/acceptance is one step, so is each other tier in the thorough profile (more examples
of hypothesis, whole matrices), and each part of the tests on every other Slurm that is unpacked.
What passed for the present commit does not run again; `--again` forgets that. Exit code 1:
something failed; its log is named.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from slurm.devcluster.roots import list_unpacked_versions
from tests.support.environments import CHECKOUT
from tests.support.slurm_releases import PARTS

FOLDER = CHECKOUT / ".nightly"
STATE = FOLDER / "state.json"
THOROUGH = ("tests/unit", "tests/contract", "tests/integration", "tests/slurm")


def read_commit() -> str:
    asked = ["git", "-C", str(CHECKOUT), "rev-parse", "HEAD"]
    return subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def list_steps() -> list[str]:
    files = sorted((CHECKOUT / "tests" / "acceptance").glob("test_*.py"))
    releases = list_unpacked_versions(CHECKOUT)
    on_releases = [f"{release} {part}" for release in releases for part in PARTS]
    return [*(str(file.relative_to(CHECKOUT)) for file in files), *THOROUGH, *on_releases]


def read_outcomes(commit: str) -> dict[str, str]:
    """Step -> passed or failed, of this commit."""
    if not STATE.exists():
        return {}
    state = json.loads(STATE.read_text())
    return state["outcomes"] if state["commit"] == commit else {}


def run_step(step: str) -> bool:
    """Run one step with its output in a log; whether it passed."""
    log = get_log(step)
    variables = {"HYPOTHESIS_PROFILE": "thorough"} if step in THOROUGH else {}
    with log.open("w") as output:
        module = "pytest" if step.startswith("tests/") else "tests.support.slurm_releases"
        command = [sys.executable, "-m", module, *step.split()]
        ended = subprocess.run(
            command, cwd=CHECKOUT, env={**os.environ, **variables}, stdout=output, stderr=output
        )
    return ended.returncode == 0


def get_log(step: str) -> Path:
    return FOLDER / f"{Path(step).name.removesuffix('.py').replace(' ', '-')}.log"


def main() -> int:
    options = argparse.ArgumentParser(description="The long proofs, an hour a call.")
    options.add_argument("--minutes", type=float, default=60, help="begin no step after these")
    options.add_argument("--again", action="store_true", help="run what has passed again")
    arguments = options.parse_args()
    FOLDER.mkdir(exist_ok=True)
    commit, began_s = read_commit(), time.monotonic()
    outcomes = {} if arguments.again else read_outcomes(commit)
    steps = list_steps()
    remaining = [step for step in steps if outcomes.get(step) != "passed"]
    for step in remaining:
        if time.monotonic() - began_s > 60 * arguments.minutes:
            break
        step_began_s = time.monotonic()
        outcomes[step] = "passed" if run_step(step) else "failed"
        STATE.write_text(json.dumps({"commit": commit, "outcomes": outcomes}, indent=1))
        took_minutes = (time.monotonic() - step_began_s) / 60
        print(f"{outcomes[step]:6} {took_minutes:6.1f} min  {step}", flush=True)
    failed = [step for step in steps if outcomes.get(step) == "failed"]
    passed = sum(outcomes.get(step) == "passed" for step in steps)
    print(f"{passed} of {len(steps)} steps passed on {commit[:10]}, {len(failed)} failed")
    for step in failed:
        print(f"  {step}: {get_log(step)}")
    if passed + len(failed) < len(steps):
        print("  the same command goes on with the rest")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
