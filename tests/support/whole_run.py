"""A whole run of the tests, in which a few that fail get one more try, alone.

Hundreds of these tests start servers and Slurm jobs on two cores, beside whatever else a machine
does. One that fails there and passes alone is named as flaky and does not end the run; CONTRIBUTING
says what is done about it. One that fails twice is a failure, and so are more than a handful.

    python -m tests.support.whole_run [options of pytest] tests/unit tests/contract
"""

import subprocess
import sys
from collections.abc import Sequence

import pytest

MAX_RETRIED = 5


class FailedTests:
    """The tests that failed, as a pytest plugin of the process that hands them to workers."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.is_cut_off = False
        """A worker died: some tests did not run at all."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        self.is_cut_off |= error is not None


def run_tests(arguments: Sequence[str]) -> int:
    """Run them with pytest; its exit code."""
    failed = FailedTests()
    code = int(pytest.main(list(arguments), plugins=[failed]))
    is_retried = code == pytest.ExitCode.TESTS_FAILED and not failed.is_cut_off
    if not is_retried or not 0 < len(failed.names) <= MAX_RETRIED:
        return code
    names = sorted(failed.names)
    print(f"\nOnce more, alone: {len(names)} that failed.", flush=True)
    again = [sys.executable, "-m", "pytest", "--exitfirst", *names]
    if code := subprocess.run(again).returncode:
        return code
    print("\nFLAKY: these failed beside others and passed alone. Fix them today:")
    print("\n".join(f"  {name}" for name in names), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_tests(sys.argv[1:]))
