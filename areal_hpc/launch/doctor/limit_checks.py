"""Checks of limits in Slurm's accounting: number of a user's jobs, and the time of each."""

import getpass
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from areal_hpc.errors import ClusterError
from areal_hpc.launch.doctor.checks import CheckResult, DoctorSubject, fail, ok, warn
from areal_hpc.launch.doctor.slurm_checks import (
    get_options_by_sample_job,
    judge_preemption,
    parse_slurm_time_as_seconds,
    read_partition,
)
from areal_hpc.rundir.jobs import CARETAKER_JOB
from areal_hpc.slurm.batch_script.script import JobRequest
from areal_hpc.slurm.commands import run_slurm_command

_ASSOCIATION_COLUMNS = (
    *("account", "user", "partition", "defaultqos"),
    *("maxsubmitjobs", "grpsubmitjobs", "maxwall"),
)
_QOS_COLUMNS = ("name", "maxsubmitjobspu", "maxsubmitjobspa", "grpsubmitjobs", "maxwall")


@dataclass(frozen=True, slots=True)
class AccountingLimit:
    owner: str
    """Whose limit it is: `QOS normal`, `account physics`."""
    max_jobs: int | None
    max_minutes: int | None
    requests: tuple[JobRequest, ...]

    @property
    def wanted_jobs(self) -> int:
        # A run goes without a caretaker behind its jobs where that would be one too many.
        return sum(one.job != CARETAKER_JOB for one in self.requests)


def check_accounting_limits(doctor_subject: DoctorSubject) -> Iterator[CheckResult]:
    enforced = doctor_subject.slurm_answer.settings.get("AccountingStorageEnforce", "").split(",")
    if not {"limits", "safe"}.intersection(enforced):
        yield ok("job limits", "this cluster enforces none")
        return
    queued = len(run_slurm_command("squeue", "--me", "--noheader", "--array").splitlines())
    limits = list(_find_limits_of_jobs(doctor_subject.job_requests))
    for limit in limits:
        if limit.max_jobs is not None:
            yield judge_job_limit(limit.owner, limit.max_jobs, limit.wanted_jobs, queued)
        for request in limit.requests:
            asked = request.shape.time_limit_minutes
            if limit.max_minutes is not None and asked > limit.max_minutes:
                yield fail(
                    f"time limit {request.job}",
                    f"the job asks for {asked} min; {limit.owner} allows {limit.max_minutes} min: "
                    "it is refused or never starts",
                    f"cluster.slurm.time_limit_minutes={limit.max_minutes}; the run continues in "
                    "the next job",
                )
    if not limits:
        yield ok("job limits", "none for your account and QOS")


def check_preemption_of_qos_jobs(doctor_subject: DoctorSubject) -> Iterator[CheckResult]:
    settings = doctor_subject.slurm_answer.settings
    every = get_options_by_sample_job(doctor_subject.slurm).values()
    names = {options.sbatch.get("qos") for options in every} - {None}
    if settings.get("PreemptType") != "preempt/qos" or not names:
        return
    for row in _query_sacctmgr_table("qos", ("name", "preemptmode", "gracetime")):
        if row["name"] in names:
            mode = row["preemptmode"].upper()
            if mode in ("", "CLUSTER"):
                mode = settings.get("PreemptMode", "OFF")
            grace_s = parse_slurm_time_as_seconds(row["gracetime"]) or 0
            yield judge_preemption(f"QOS {row['name']}", mode, grace_s)


def judge_job_limit(owner: str, max_jobs: int, wanted_jobs: int, queued_jobs: int) -> CheckResult:
    found = f"{owner} allows {max_jobs} jobs at a time; the recipe submits {wanted_jobs}"
    if wanted_jobs > max_jobs:
        hint = "fewer cells, or another QOS"
        return fail("job limits", f"{found}: sbatch refuses some, and so none is submitted", hint)
    if wanted_jobs + queued_jobs > max_jobs:
        hint = f"submit when {wanted_jobs + queued_jobs - max_jobs} have ended"
        return warn("job limits", f"{found}, and {queued_jobs} of yours are there", hint)
    if wanted_jobs == max_jobs:
        return warn(
            "job limits",
            f"{found}, so that no caretaker can wait behind them",
            "one cell fewer; else a person resumes the run when all of its jobs end at once",
        )
    return ok("job limits", found)


def _find_limits_of_jobs(requests: Sequence[JobRequest]) -> Iterator[AccountingLimit]:
    user = getpass.getuser()
    default_account = _query_sacctmgr_table("user", ("defaultaccount",), f"name={user}")[0][
        "defaultaccount"
    ]
    account_by_job = {
        one.job: str(one.parameters["additional_parameters"].get("account", default_account))
        for one in requests
    }
    accounts = ",".join(sorted(set(account_by_job.values())))
    default_qos: dict[str, str] = {}
    for row in _query_sacctmgr_table("assoc", _ASSOCIATION_COLUMNS, f"account={accounts}"):
        if row["user"] not in ("", user):
            continue
        if row["user"]:
            default_qos[row["account"]] = row["defaultqos"]
        mine = [
            one
            for one in requests
            if account_by_job[one.job] == row["account"]
            and row["partition"] in ("", one.parameters.get("partition"))
        ]
        number = row["maxsubmitjobs" if row["user"] else "grpsubmitjobs"]
        yield from _build_limits(f"account {row['account']}", number, row["maxwall"], mine)
    jobs_by_qos: dict[str, list[JobRequest]] = {}
    for one in requests:
        flags = one.parameters["additional_parameters"]
        own = str(flags.get("qos", default_qos.get(account_by_job[one.job], "")))
        for name in {own, _query_partition_qos(str(one.parameters.get("partition", "")))} - {""}:
            jobs_by_qos.setdefault(name, []).append(one)
    for row in _query_sacctmgr_table("qos", _QOS_COLUMNS):
        mine, owner = jobs_by_qos.get(row["name"], []), f"QOS {row['name']}"
        yield from _build_limits(owner, row["maxsubmitjobspu"], row["maxwall"], mine)
        for column in ("maxsubmitjobspa", "grpsubmitjobs"):
            yield from _build_limits(owner, row[column], "", mine)


def _build_limits(
    owner: str, max_jobs_text: str, max_wall_text: str, requests: Sequence[JobRequest]
) -> Iterator[AccountingLimit]:
    max_jobs = int(max_jobs_text) if max_jobs_text.isdigit() else None
    max_s = parse_slurm_time_as_seconds(max_wall_text)
    if requests and (max_jobs is not None or max_s is not None):
        max_minutes = None if max_s is None else max_s // 60
        yield AccountingLimit(owner, max_jobs, max_minutes, tuple(requests))


def _query_sacctmgr_table(
    entity: str, columns: Sequence[str], *conditions: str
) -> list[Mapping[str, str]]:
    shown = run_slurm_command(
        *("sacctmgr", "--noheader", "--parsable2", "show", entity),
        *(("where", *conditions) if conditions else ()),
        f"format={','.join(columns)}",
    )
    lines = (line.split("|") for line in shown.splitlines())
    return [dict(zip(columns, cells, strict=False)) for cells in lines]


def _query_partition_qos(partition: str) -> str:
    if not partition or "," in partition:
        return ""
    try:
        qos = read_partition(partition).get("QoS", "N/A")
    except ClusterError:
        return ""  # another check says that Slurm does not know it
    return "" if qos == "N/A" else qos
