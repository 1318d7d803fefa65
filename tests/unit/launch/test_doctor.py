"""What doctor finds on this machine, where no Slurm is asked."""

import sys
from pathlib import Path

import pytest

from areal_hpc.launch.doctor.checks import CheckStatus, fail, format_checks, ok, warn
from areal_hpc.launch.doctor.python_checks import check_interpreters
from areal_hpc.launch.doctor.slurm_checks import (
    _parse_minutes,
    judge_preemption,
    judge_resubmission,
)
from areal_hpc.launch.doctor.storage_checks import check_storage


def test_a_directory_is_judged_by_its_promises_and_left_as_it_was(tmp_path: Path) -> None:
    found = {check.name: check.verdict for check in check_storage(tmp_path)}
    kept = dict.fromkeys(("file root", "rename, fsync", "locks", "clock"), CheckStatus.OK)
    assert found | kept == found
    assert found["shared"] is CheckStatus.WARN, "one node alone cannot know"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (one,) = check_storage(tmp_path / "file" / "below")
    assert one.verdict is CheckStatus.FAIL
    assert "cluster.fileroot" in one.hint


def test_interpreters_tell_their_versions_or_what_they_lack(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 127\n")
    broken.chmod(0o755)
    pythons = {"train": sys.executable, "serve": sys.executable, "agents": str(broken)}
    train, serve, agents = check_interpreters(pythons)
    assert train.verdict is CheckStatus.OK
    assert "megatron-core 0.16.1" in train.finding
    assert serve.verdict is CheckStatus.FAIL
    assert "lacks sglang" in serve.finding
    assert agents.finding.endswith("does not start: no such library")
    (missing,) = check_interpreters({"train": "/no/such/python"})
    assert missing.hint == "make setup, or cluster.train.python=/path/to/python"


@pytest.mark.parametrize(
    ("text", "minutes"), [("1-00:00:00", 1440), ("02:30:00", 150), ("UNLIMITED", None), ("", None)]
)
def test_time_limits_are_read_as_slurm_writes_them(text: str, minutes: int | None) -> None:
    assert _parse_minutes(text) == minutes


def test_every_finding_that_is_not_well_says_what_to_try() -> None:
    lines = format_checks(
        [ok("a", "good"), warn("longer", "so so\nand more", "this"), fail("c", "bad", "that")]
    )
    assert lines == [
        "ok    a       good",
        "warn  longer  so so",
        "              and more",
        "              try: this",
        "fail  c       bad",
        "              try: that",
        "1 ok, 1 warnings, 1 failed",
    ]


@pytest.mark.parametrize(
    ("facts", "status", "said"),
    [
        ({"PreemptMode": "OFF"}, CheckStatus.OK, "not preempted"),
        ({"PreemptMode": "REQUEUE", "GraceTime": "30"}, CheckStatus.OK, "Slurm starts it again"),
        ({"PreemptMode": "CANCEL", "GraceTime": "30"}, CheckStatus.OK, "submits itself again"),
        ({"PreemptMode": "CANCEL", "GraceTime": "0"}, CheckStatus.WARN, "cancelled at once"),
        ({"PreemptMode": "GANG,SUSPEND"}, CheckStatus.WARN, "suspended"),
    ],
)
def test_what_a_preemption_does_is_foretold(
    facts: dict[str, str], status: CheckStatus, said: str
) -> None:
    found = judge_preemption("p", facts)
    assert found.verdict is status
    assert said in found.finding


def test_who_may_submit_is_foretold() -> None:
    assert judge_resubmission("p", {"AllocNodes": "ALL"}).verdict is CheckStatus.OK
    assert "only login[1-2]" in judge_resubmission("p", {"AllocNodes": "login[1-2]"}).finding
