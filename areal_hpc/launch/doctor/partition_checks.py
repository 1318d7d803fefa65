"""Checks of partitions: state, time limits, and what becomes of a job that is preempted or ends."""

import re
from collections.abc import Iterator, Mapping

from areal_hpc.errors import ClusterError
from areal_hpc.launch.doctor.checks import CheckResult, DoctorSubject, fail, ok, warn
from areal_hpc.recipe.sections.cluster import JobOptions, SlurmConfig
from areal_hpc.rundir.rendezvous import EVALUATION_CELL, format_cell_name
from areal_hpc.slurm.batch_script.script import DEFAULT_TIME_LIMIT_MINUTES
from areal_hpc.slurm.commands import run_slurm_command


def get_options_by_sample_job(slurm: SlurmConfig) -> dict[str, JobOptions]:
    found = {job: slurm.get_options_of_job(job) for job in ("trainer", format_cell_name(0))}
    evaluation = slurm.get_options_of_job(EVALUATION_CELL)
    if evaluation != found[format_cell_name(0)]:
        found[EVALUATION_CELL] = evaluation
    return found


def read_partition(partition_name: str) -> dict[str, str]:
    shown = run_slurm_command("scontrol", "show", "partition", partition_name, "--oneliner")
    return dict(re.findall(r"(\w+)=(\S+)", shown))


def check_partitions(doctor_subject: DoctorSubject) -> Iterator[CheckResult]:
    limits: dict[str, int] = {}
    slurm = doctor_subject.slurm
    for options in get_options_by_sample_job(slurm).values():
        asked = options.time_limit_minutes or DEFAULT_TIME_LIMIT_MINUTES
        for name in (options.partition or "").split(","):
            if name:
                limits[name] = max(limits.get(name, 0), asked)
    if not limits:
        yield ok("partition", "none named: Slurm's default")
    for name, time_limit_minutes in limits.items():
        try:
            facts = read_partition(name)
        except ClusterError:
            yield fail(f"partition {name}", "Slurm does not know it", "sinfo -s lists yours")
            continue
        yield _judge_partition(name, facts, time_limit_minutes)
        yield judge_preemption(name, facts)
        yield judge_submission_from_jobs(name, facts, slurm)


def _judge_partition(
    partition_name: str, partition_facts: Mapping[str, str], time_limit_minutes: int
) -> CheckResult:
    name, state = f"partition {partition_name}", partition_facts.get("State")
    if state != "UP":
        return fail(name, f"is {state}", "sinfo -s; name one that is up")
    nodes, max_time = (partition_facts.get(key, "?") for key in ("TotalNodes", "MaxTime"))
    what, most_min = f"{nodes} nodes, at most {max_time}", parse_slurm_time_as_minutes(max_time)
    if most_min is not None and time_limit_minutes > most_min:
        hint = f"cluster.slurm.time_limit_minutes={most_min}; the run continues in the next job"
        return fail(name, f"{what}; jobs ask for {time_limit_minutes} min", hint)
    return ok(name, f"up, {what}, PreemptMode={partition_facts.get('PreemptMode', '?')}")


def judge_preemption(partition_or_qos: str, preemption_facts: Mapping[str, str]) -> CheckResult:
    """What happens to a job of a partition or QOS that a job of higher priority displaces.

    `preemption_facts` has its PreemptMode and GraceTime, by `scontrol`'s names.
    """
    what, grace = f"preemption {partition_or_qos}", preemption_facts.get("GraceTime", "0")
    mode = preemption_facts.get("PreemptMode", "OFF").split(",")[0]
    grace_s = int(grace) if grace.isdigit() else 0
    if mode in ("OFF", "DISABLED"):
        return ok(what, "jobs there are not preempted")
    if mode == "REQUEUE":
        return ok(what, f"a preempted job has {grace_s} s, and Slurm starts it again")
    if mode == "CANCEL" and grace_s:
        return ok(what, f"a preempted job has {grace_s} s, in which it asks for another start")
    if mode == "CANCEL":
        return warn(
            what,
            "a preempted job is cancelled at once: the run's caretaker submits it again",
            "ask the site for a GraceTime; a partition with PreemptMode=REQUEUE is better",
        )
    return warn(
        what,
        f"PreemptMode={mode}: a preempted job is suspended, and the run waits for it",
        "a partition with PreemptMode=REQUEUE lets the run go on elsewhere",
    )


def judge_submission_from_jobs(
    partition_name: str, partition_facts: Mapping[str, str], slurm: SlurmConfig
) -> CheckResult:
    from_nodes, what = partition_facts.get("AllocNodes", "ALL"), f"resubmission {partition_name}"
    if from_nodes == "ALL":
        return ok(what, "jobs may submit jobs")
    which = "that Slurm cannot requeue" if slurm.requeue else "that ends early (requeue=false)"
    return warn(
        what,
        f"only {from_nodes} may submit jobs: no job of the run submits one {which}",
        "keep `areal-hpc caretaker RUN` running on one of those nodes (tmux, or a service)",
    )


def check_requeue(doctor_subject: DoctorSubject) -> Iterator[CheckResult]:
    """What becomes of a job that ends early."""
    slurm = doctor_subject.slurm
    yield judge_requeue(slurm, doctor_subject.slurm_answer.settings.get("JobRequeue", ""))


def judge_requeue(slurm: SlurmConfig, default: str) -> CheckResult:
    """`default` is JobRequeue of slurm.conf."""
    if slurm.requeue:
        found = "a job that ends early is started again under its number"
        return ok("requeue", found + (", whatever JobRequeue=0 says" if default == "0" else ""))
    found = "slurm.requeue=false: the caretaker submits a job that ends early under another number"
    return ok("requeue", found)


def parse_slurm_time_as_minutes(text: str) -> int | None:
    seconds = parse_slurm_time_as_seconds(text)
    return None if seconds is None else seconds // 60


def parse_slurm_time_as_seconds(text: str) -> int | None:
    """Seconds of `days-hours:minutes:seconds`; None for UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
