"""A whole run of the tests: its progress in time, one more try for a few, and what is not tested.

    python -m tests.support.whole_run [options of pytest] tests/unit tests/contract

Hundreds of these tests start servers and Slurm jobs on two cores, beside whatever else a machine
does. One that fails there and passes alone is named as flaky and does not end the run; CONTRIBUTING
says what is done about it. One that fails twice is a failure, and so are more than a handful.
"""

import os
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest

from slurm.devcluster.roots import list_unpacked_versions
from tests.support.environments import CHECKOUT
from tests.support.file_durations import estimate_s, write_table
from tests.support.forked_workers import ForkedWorkers

WORKERS = 5
"""More than cores: many tests wait for Slurm, for a start or for a time to pass."""
MAX_RETRIED = 5
PROGRESS_EVERY_S = 30.0
PROGRAMS = {
    "podman": "sandboxes on podman",
    "apptainer": "sandboxes on Apptainer (a stand-in takes its place)",
}
"""Program -> the tests that a machine without it leaves out."""
NEVER_TESTED = "CUDA devices (make gpu), acceptance (make nightly)"


class WholeRun:
    """A pytest plugin of the process that hands tests to workers."""

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.durations_s: dict[str, float] = defaultdict(float)
        self._outcomes: Counter[str] = Counter()
        self._remaining_by_file: Counter[str] = Counter()
        self._began_s = self._shown_s = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print nothing for a test that passed: the progress is in lines of its own."""
        return ("passed", "", "PASSED") if report.passed and report.when == "call" else None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        names = (item.nodeid for item in session.items)
        self._remaining_by_file = Counter(name.partition("::")[0] for name in names)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.durations_s[file] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)
            print(f"\nFAILED {report.nodeid}", flush=True)
        if report.when == "call":
            self._outcomes[report.outcome] += 1
        if report.when == "teardown":
            self._remaining_by_file[file] -= 1
        if time.monotonic() - self._shown_s > PROGRESS_EVERY_S:
            self._show_progress()

    def _show_progress(self) -> None:
        self._shown_s = time.monotonic()
        all_s = sum(map(estimate_s, self._remaining_by_file))
        remaining_s = sum(
            estimate_s(file) for file, count in self._remaining_by_file.items() if count > 0
        )
        minutes, seconds = divmod(round(self._shown_s - self._began_s), 60)
        share = 1 - remaining_s / all_s if all_s else 0.0
        print(
            f"{minutes:3d} min {seconds:02d} s: {share:4.0%} of the time, "
            f"{self._outcomes['passed']} passed, {len(self.failed)} failed",
            flush=True,
        )


def run_tests(arguments: Sequence[str]) -> int:
    # Importing Megatron imports torch's compiler as well, which nothing on a CPU uses.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    run = WholeRun()
    workers = ForkedWorkers(WORKERS, run)
    code = int(pytest.main(list(arguments), plugins=[run, workers]))
    if os.environ.get("WRITE_DURATIONS"):
        write_table(run.durations_s)
    if code == pytest.ExitCode.TESTS_FAILED and not workers.is_cut_off:
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
