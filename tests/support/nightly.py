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

from slurm.devcluster.roots import list_unpacked_versions
from tests.support.environments import CHECKOUT

FOLDER = CHECKOUT / ".nightly"
STATE = FOLDER / "state.json"
THOROUGH = ("tests/unit", "tests/contract", "tests/integration", "tests/slurm")
ON_RELEASES = ("tests/slurm", "tests/acceptance/test_slurm_events.py")
"""Tests that run on each release of Slurm."""


def list_steps() -> dict[str, tuple[str, dict[str, str]]]:
    """List pytest's target and further variables of its environment, by the step's name."""
    thorough = {"HYPOTHESIS_PROFILE": "thorough"}
    files = sorted((CHECKOUT / "tests" / "acceptance").glob("test_*.py"))
    return {
        **{file.stem: (str(file.relative_to(CHECKOUT)), {}) for file in files},
        **{tier.replace("/", "-"): (tier, thorough) for tier in THOROUGH},
        **{
            f"slurm-{release}-{target.rpartition('/')[2]}": (
                target,
                {**thorough, "TESTS_SLURM": release},
            )
            for release in list_unpacked_versions(CHECKOUT)
            for target in ON_RELEASES
        },
    }


def main() -> int:
    options = argparse.ArgumentParser(description="The long proofs, an hour a call.")
    options.add_argument("--minutes", type=float, default=60, help="begin no step after these")
    options.add_argument("--again", action="store_true", help="run what has passed again")
    arguments = options.parse_args()
    FOLDER.mkdir(exist_ok=True)
    git = ["git", "-C", str(CHECKOUT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    state = json.loads(STATE.read_text()) if STATE.exists() and not arguments.again else {}
    outcomes: dict[str, str] = state["outcomes"] if state.get("commit") == commit else {}
    began_s, steps = time.monotonic(), list_steps()
    for name, (target, variables) in steps.items():
        if outcomes.get(name) == "passed":
            continue
        if time.monotonic() - began_s > 60 * arguments.minutes:
            print("the same command goes on with the rest")
            break
        with (FOLDER / f"{name}.log").open("w") as log:
            command = [sys.executable, "-m", "pytest", "-q", "-rfE", target]
            environ = {**os.environ, **variables}
            code = subprocess.run(
                command, cwd=CHECKOUT, env=environ, stdout=log, stderr=log
            ).returncode
        outcomes[name] = "failed" if code else "passed"
        STATE.write_text(json.dumps({"commit": commit, "outcomes": outcomes}, indent=1))
        print(f"{outcomes[name]}  {name}", flush=True)
    failed = [name for name in steps if outcomes.get(name) == "failed"]
    passed = sum(outcomes.get(name) == "passed" for name in steps)
    print(f"{passed} of {len(steps)} steps passed on {commit[:10]}, {len(failed)} failed")
    for name in failed:
        print(f"  {name}: {FOLDER / name}.log")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
