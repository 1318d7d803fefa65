"""What doctor finds on this machine, where no Slurm is asked."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.launch.doctor import machine_checks
from areal_hpc.launch.doctor.machine_checks import (
    check_storage,
    check_storage_by_job,
    has_memory_limit,
    has_seccomp,
    has_user_namespaces,
)
from areal_hpc.launch.doctor.registry import CHECKS, DoctorCheck, check_interpreters, run_checks
from areal_hpc.launch.doctor.results import (
    CheckResult,
    CheckStatus,
    DoctorSubject,
    fail,
    format_checks,
    ok,
    warn,
)
from areal_hpc.launch.doctor.slurm_checks import (
    judge_commands_in_container,
    judge_gpus_by_task,
    judge_job_limit,
    judge_preemption,
    judge_submission_from_jobs,
    parse_slurm_time,
)
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.sections.cluster import JobOptions, SlurmConfig
from tests.support.environments import CHECKOUT


def test_a_directory_is_judged_by_its_promises_and_left_as_it_was(tmp_path: Path) -> None:
    found = {check.name: check.verdict for check in check_storage(DoctorSubject(fileroot=tmp_path))}
    kept = dict.fromkeys(("file root", "rename, fsync", "locks", "clock"), CheckStatus.OK)
    assert found | kept == found
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (one,) = check_storage(DoctorSubject(fileroot=tmp_path / "file" / "below"))
    assert one.verdict is CheckStatus.FAIL
    assert "cluster.fileroot" in one.hint


def test_ctrl_c_leaves_neither_the_job_of_the_storage_check_nor_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, ...]] = []

    def run_slurm(*words: str) -> str:
        called.append(words)
        return "17;cluster\n"

    def interrupt(*arguments: object) -> CheckResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine_checks, "run_slurm_command", run_slurm)
    monkeypatch.setattr(machine_checks, "await_answer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        check_storage_by_job(tmp_path, JobOptions(), print)
    assert called[-1] == ("scancel", "--quiet", "17")
    assert list(tmp_path.iterdir()) == []


def test_interpreters_tell_their_versions_or_what_they_lack(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 127\n")
    broken.chmod(0o755)
    pythons = {"train": sys.executable, "serve": sys.executable, "agents": str(broken)}
    recipe = load_recipe(CHECKOUT / "recipes" / "quickstart.yaml")
    train, serve, agents = check_interpreters(recipe, pythons)
    assert train.verdict is CheckStatus.OK
    assert "megatron-core 0.16.1" in train.finding
    assert serve.verdict is CheckStatus.FAIL
    assert "lacks sglang" in serve.finding
    assert agents.finding.endswith("does not run: no such library")
    (missing,) = check_interpreters(recipe, {"train": "/no/such/python"})
    assert missing.hint == "make setup, or cluster.train.python=/path/to/python"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1-00:00:00", 86400), ("02:30:00", 9000), ("UNLIMITED", None), ("", None)],
)
def test_time_limits_are_read_as_slurm_writes_them(text: str, seconds: int | None) -> None:
    assert parse_slurm_time(text) == seconds


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
    ("mode", "grace_s", "status", "said"),
    [
        ("OFF", 0, CheckStatus.OK, "not preempted"),
        ("REQUEUE", 30, CheckStatus.OK, "Slurm starts it again"),
        ("CANCEL", 30, CheckStatus.OK, "asks for another start"),
        ("CANCEL", 0, CheckStatus.WARN, "cancelled at once"),
        ("GANG,SUSPEND", 0, CheckStatus.WARN, "suspended"),
    ],
)
def test_what_a_preemption_does_is_foretold(
    mode: str, grace_s: int, status: CheckStatus, said: str
) -> None:
    found = judge_preemption("p", mode, grace_s)
    assert found.verdict is status
    assert said in found.finding


@pytest.mark.parametrize(
    ("nodes", "is_requeued", "status", "said"),
    [
        ("ALL", False, CheckStatus.OK, ""),
        ("login[1-2]", True, CheckStatus.WARN, "that Slurm cannot requeue"),
        ("login[1-2]", False, CheckStatus.WARN, "that ends early"),
    ],
)
def test_who_may_submit_is_foretold(
    nodes: str, is_requeued: bool, status: CheckStatus, said: str
) -> None:
    found = judge_submission_from_jobs(
        "p", nodes, SlurmConfig(sbatch={} if is_requeued else {"no-requeue": True})
    )
    assert found.verdict is status
    assert said in found.finding
    assert "areal-hpc caretaker RUN" in found.hint or status is CheckStatus.OK


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({}, CheckStatus.WARN),
        ({"container": {"mounts": ["/run/munge"]}}, CheckStatus.OK),
    ],
)
def test_containers_without_munge_need_a_caretaker_outside(
    options: dict[str, Any], status: CheckStatus
) -> None:
    assert judge_commands_in_container(SlurmConfig.model_validate(options)).verdict is status


@pytest.mark.parametrize(("kind", "warnings"), [("pyxis", 1), ("apptainer", 0)])
def test_gpus_by_task_are_warned_of_in_containers_of_pyxis(kind: str, warnings: int) -> None:
    container = {"kind": kind, "train": "/a.sqsh", "serve": "/b.sqsh"}
    jobs = {"cell": {"sbatch": {"gpus-per-task": 1}}}
    site = SlurmConfig.model_validate({"container": container, "jobs": jobs})
    assert len([*judge_gpus_by_task(site)]) == warnings


@pytest.mark.parametrize(
    ("max_jobs", "wanted", "queued", "status"),
    [
        (5, 4, 0, CheckStatus.OK),
        (3, 4, 0, CheckStatus.FAIL),
        (4, 4, 1, CheckStatus.WARN),
        (4, 4, 0, CheckStatus.WARN),
    ],
)
def test_a_limit_of_jobs_is_compared_with_those_of_the_recipe(
    max_jobs: int, wanted: int, queued: int, status: CheckStatus
) -> None:
    found = judge_job_limit("QOS normal", max_jobs, wanted, queued)
    assert found.verdict is status
    assert f"QOS normal allows {max_jobs} jobs" in found.finding


def test_a_check_that_raises_has_failed_and_hides_no_other() -> None:
    def refuse(subject: DoctorSubject) -> list[CheckResult]:
        raise RecipeError("the shoe does not fit", hint="another foot")

    def stumble(subject: DoctorSubject) -> Iterator[CheckResult]:
        yield ok("first", "good")
        raise ValueError("oh")

    checks = (
        DoctorCheck("refusing", refuse),
        DoctorCheck("stumbling", stumble),
        DoctorCheck("left out", refuse, ("recipe",)),
        DoctorCheck("last", lambda subject: [ok("last", "good")]),
    )
    found = run_checks(DoctorSubject(), checks=checks)
    assert [(one.name, one.verdict) for one in found] == [
        ("refusing", CheckStatus.FAIL),
        ("first", CheckStatus.OK),
        ("stumbling", CheckStatus.FAIL),
        ("last", CheckStatus.OK),
    ]
    assert (found[0].finding, found[0].hint) == ("the shoe does not fit", "another foot")
    assert "ValueError: oh" in found[2].finding
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_who_does_not_mean_slurm_is_not_told_of_its_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's commands are here, and there is no cluster: without a file they look for 15 s."""
    (tmp_path / "slurm.conf").touch()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    one, isolation, means = run_checks(DoctorSubject())
    assert (isolation.name, means.name) == ("isolation", "means of isolation")
    assert one.verdict is CheckStatus.OK
    assert "`areal-hpc run` works without it" in one.finding
    assert len(one.finding.splitlines()) == 1
    meant = run_checks(DoctorSubject(has_site=True))
    verdicts = [check.verdict for check in meant]
    assert verdicts == [CheckStatus.FAIL, isolation.verdict, CheckStatus.OK]
    assert len(meant[0].finding.splitlines()) == 1


@pytest.mark.parametrize(
    ("membership", "limits", "is_held"),
    [
        ("4:memory:/job/step\n0::/\n", {"memory/job/memory.limit_in_bytes": "1073741824"}, True),
        ("4:memory:/job\n", {"memory/job/memory.limit_in_bytes": "9223372036854771712"}, False),
        ("0::/slurm/job_1/step_0\n", {"slurm/job_1/memory.max": "1073741824"}, True),
        ("0::/slurm/job_1/step_0\n", {"slurm/job_1/memory.max": "max"}, False),
        ("1:cpu:/job\n", {"cpu/job/memory.max": "1"}, False),
    ],
)
def test_a_control_group_or_one_above_it_limits_memory(
    membership: str, limits: dict[str, str], is_held: bool, tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, limit in limits.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"{limit}\n")
    assert has_memory_limit(tmp_path / "membership", tmp_path) is is_held


def test_means_of_isolation_are_what_the_kernel_says(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("Name:\tx\nSeccomp:\t0\n")
    assert [has_seccomp(tmp_path, one) for one in ("x86_64", "riscv64")] == [True, False]
    (tmp_path / "self" / "status").write_text("Name:\tx\n")
    assert not has_seccomp(tmp_path, "x86_64")
    assert not has_user_namespaces(tmp_path)
    (tmp_path / "sys" / "user").mkdir(parents=True)
    for number, allowed in (("0", False), ("95000", True)):
        (tmp_path / "sys" / "user" / "max_user_namespaces").write_text(f"{number}\n")
        assert has_user_namespaces(tmp_path) is allowed
