"""A whole run of the tests: one more try for a few, and what is not tested.

    python -m tests.support.whole_run [options of pytest] tests/unit tests/contract

Hundreds of these tests start servers and Slurm jobs on two cores, beside whatever else a machine
does. One that fails there and passes alone is named as flaky and does not end the run; CONTRIBUTING
says what is done about it. One that fails twice is a failure, and so are more than a handful.
"""

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence

import pytest

from slurm.devcluster.roots import list_unpacked_versions
from tests.support.environments import CHECKOUT
from tests.support.file_durations import write_table

MAX_RETRIED = 5
PROGRAMS = {
    "podman": "sandboxes on podman",
    "apptainer": "sandboxes on Apptainer (a stand-in takes its place)",
}
"""Program -> what goes untested on a machine without it."""
NEVER_TESTED = "CUDA devices (make gpu), acceptance (make nightly)"


class WholeRun:
    """A pytest plugin of the process that hands tests to workers."""

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.is_cut_off = False
        """A worker died: some tests did not run at all."""
        self.durations_s: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations_s[report.nodeid.partition("::")[0]] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)
            print(f"\nFAILED {report.nodeid}", flush=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        self.is_cut_off |= error is not None


def run_tests(arguments: Sequence[str]) -> int:
    """Run them with pytest; its exit code."""
    # Importing Megatron imports torch's compiler as well, which nothing on a CPU uses.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    run = WholeRun()
    code = int(pytest.main(list(arguments), plugins=[run]))
    if os.environ.get("WRITE_DURATIONS"):
        write_table(run.durations_s)
    if code == pytest.ExitCode.TESTS_FAILED and not run.is_cut_off:
        code = retry(sorted(run.failed))
    print(f"NOT TESTED here: {'; '.join(list_untested(arguments))}", flush=True)
    return code


def retry(names: Sequence[str]) -> int:
    """Run a few failed tests once more, alone."""
    if not 0 < len(names) <= MAX_RETRIED:
        return pytest.ExitCode.TESTS_FAILED
    print(f"\nOnce more, alone: {len(names)} that failed.", flush=True)
    again = [sys.executable, "-m", "pytest", "--exitfirst", *names]
    if code := subprocess.run(again).returncode:
        return code
    print("\nFLAKY: these failed beside others and passed alone. Fix them today:")
    print("\n".join(f"  {name}" for name in names), flush=True)
    return 0


def list_untested(arguments: Sequence[str]) -> list[str]:
    """What this machine, and this call, left out."""
    absent = [
        f"{what}: there is no {name}" for name, what in PROGRAMS.items() if not shutil.which(name)
    ]
    if "tests/slurm" not in arguments:
        absent.insert(0, "Slurm (make test SLURM=1 installs and tests it, as root on Debian)")
    elif not list_unpacked_versions(CHECKOUT):
        absent.insert(0, "Slurm 24.11 and 26.05: not unpacked here (make slurm-roots)")
    return [*absent, NEVER_TESTED]


if __name__ == "__main__":
    sys.exit(run_tests(sys.argv[1:]))
