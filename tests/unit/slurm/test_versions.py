"""What differs between releases of Slurm."""

from datetime import datetime

import pytest

from areal_hpc.slurm.states import (
    describe_proof,
    find_error_time,
    is_release_covered,
    is_slurm_error_line,
    parse_exit_status,
    parse_release,
)

AT = "2026-11-29T08:21:13"


@pytest.mark.parametrize(
    "line",
    [
        f"slurmstepd: error: *** JOB 7 ON n02 CANCELLED AT {AT} DUE TO TIME LIMIT ***",
        f"slurmstepd-n05: error: *** STEP 7.0 ON n02 CANCELLED AT {AT} ***",
        f"[{AT}.243] error: *** STEP 31.0 ON n02 CANCELLED AT {AT} DUE to SIGNAL Terminated ***",
        f"[{AT}.243] error: Detected 1 oom_kill event in StepId=31.0.",
    ],
)
def test_an_error_of_slurmstepd_is_found_with_its_time_on_every_release(line: str) -> None:
    assert is_slurm_error_line(line)
    told = datetime.fromisoformat(AT).timestamp() if AT in line else None
    assert find_error_time(line) == told


def test_an_error_of_srun_has_no_time() -> None:
    line = "srun: error: n02: task 0: Exited with exit code 137"
    assert is_slurm_error_line(line)
    assert find_error_time(line) is None


@pytest.mark.parametrize(
    "line", ["2026-11-29 08:21:13,000 ERROR it broke", "[2026-11-29 08:21:13 TP0] Decode batch"]
)
def test_what_programs_log_is_no_error_of_slurm(line: str) -> None:
    assert not is_slurm_error_line(line)


@pytest.mark.parametrize(
    ("printed", "status"),
    [("256", (1, 0)), ("9", (0, 9)), ("1:0", (1, 0)), ("0:9", (0, 9)), ("0", (0, 0)), ("", (0, 0))],
)
def test_exit_statuses_are_those_of_22_05_and_of_later_ones(
    printed: str, status: tuple[int, int]
) -> None:
    assert parse_exit_status(printed) == status


@pytest.mark.parametrize(
    ("version", "release", "is_near", "said"),
    [
        ("22.05.8", "22.05", True, "the tests run on it"),
        ("slurm-wlm 26.05.5", "26.05", True, "the tests run on it"),
        ("25.05.0-rc1", "25.05", True, "not tested itself, but 22.05, 24.11, 26.05 are"),
        ("21.08.5", "21.08", False, "outside of what is tested: 22.05, 24.11, 26.05"),
        ("26.11.0", "26.11", False, "outside of what is tested: 22.05, 24.11, 26.05"),
        ("?", "", False, "outside of what is tested: 22.05, 24.11, 26.05"),
    ],
)
def test_a_version_says_what_is_proven_on_it(
    version: str, release: str, is_near: bool, said: str
) -> None:
    assert parse_release(version) == release
    assert is_release_covered(version) == is_near
    assert said in describe_proof(version)
