"""Checks of Slurm: its commands, partitions, limits and containers, and a test submission."""

import getpass
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.launch.doctor.results import CheckResult, DoctorSubject, fail, ok, warn
from areal_hpc.recipe.sections.cluster import JobOptions, SlurmConfig, format_flags
from areal_hpc.rundir.jobs import CARETAKER_JOB
from areal_hpc.rundir.rendezvous import EVALUATION_CELL, format_cell_name, is_training_cell_job
from areal_hpc.slurm.batch_script import (
    DEFAULT_TIME_LIMIT_MINUTES,
    SHARE_FLAGS,
    JobRequest,
    spell_pyxis_image,
)
from areal_hpc.slurm.commands import run_slurm_command
from areal_hpc.slurm.states import describe_proof, is_release_covered
from areal_hpc.slurm.submit import refuse_federation, render_script

REQUIRED_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")


def check_slurm_answers(subject: DoctorSubject) -> Iterator[CheckResult]:
    missing = [name for name in REQUIRED_COMMANDS if shutil.which(name) is None]
    outage = subject.slurm_answer.outage
    if not missing and not outage:
        version = subject.slurm_answer.settings.get("SLURM_VERSION", "?")
        yield ok("slurm", f"{version} answers: {', '.join(REQUIRED_COMMANDS)}")
        yield judge_release(version)
        try:
            refuse_federation()
        except RecipeError as refusal:
            yield fail("federation", refusal.problems[0].message, refusal.problems[0].hint)
    elif not subject.involves_slurm:
        yield ok("slurm", f"none here ({outage}); `areal-hpc run` works without it")
    elif missing:
        hint = "run this on a login node of the cluster; module load slurm on some"
        yield fail("slurm", f"not found: {', '.join(missing)}", hint)
    else:
        hint = "scontrol ping; Slurm's commands find the cluster by SLURM_CONF or /etc/slurm"
        yield fail("slurm", outage, hint)


def judge_release(version: str) -> CheckResult:
    proof = describe_proof(version)
    if is_release_covered(version):
        return ok("Slurm release", proof)
    return warn("Slurm release", proof, "try a short run; docs/devcluster.md has what was seen")


def check_accounting(subject: DoctorSubject) -> Iterator[CheckResult]:
    kind = subject.slurm_answer.settings.get("AccountingStorageType", "")
    if kind.endswith("slurmdbd") and shutil.which("sacct"):
        yield ok("accounting", "on: sacct tells what happened to jobs of long ago")
    else:
        yield ok("accounting", "off: Slurm forgets a job a few minutes after it ends")


def check_partitions(subject: DoctorSubject) -> Iterator[CheckResult]:
    """Check each partition's state, time limit, preemption mode, and nodes that may submit jobs."""
    slurm, minutes_by_partition = subject.slurm, dict[str, int]()
    for options in get_sample_options(slurm).values():
        minutes = options.time_limit_minutes or DEFAULT_TIME_LIMIT_MINUTES
        for name in filter(None, (options.partition or "").split(",")):
            minutes_by_partition[name] = max(minutes_by_partition.get(name, 0), minutes)
    if not minutes_by_partition:
        yield ok("partition", "none named: Slurm's default")
    for name, minutes in minutes_by_partition.items():
        try:
            facts = read_partition(name)
        except ClusterError:
            yield fail(f"partition {name}", "Slurm does not know it", "sinfo -s lists yours")
            continue
        yield _judge_partition(f"partition {name}", facts, minutes)
        grace = facts.get("GraceTime", "0")
        grace_s = int(grace) if grace.isdigit() else 0
        yield judge_preemption(name, facts.get("PreemptMode", "OFF"), grace_s)
        yield judge_submission_from_jobs(name, facts.get("AllocNodes", "ALL"), slurm)


def _judge_partition(
    name: str, partition_facts: Mapping[str, str], time_limit_minutes: int
) -> CheckResult:
    state, max_time = (partition_facts.get(key, "?") for key in ("State", "MaxTime"))
    if state != "UP":
        return fail(name, f"is {state}", "sinfo -s; name one that is up")
    size = f"{partition_facts.get('TotalNodes', '?')} nodes, at most {max_time}"
    max_s = parse_slurm_time(max_time)
    if max_s is not None and 60 * time_limit_minutes > max_s:
        hint = f"cluster.slurm.time_limit_minutes={max_s // 60}; the run continues in the next job"
        return fail(name, f"{size}; jobs ask for {time_limit_minutes} min", hint)
    return ok(name, f"up, {size}")


def parse_slurm_time(text: str) -> int | None:
    """Convert `days-hours:minutes:seconds` to seconds; None for UNLIMITED."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def get_sample_options(slurm: SlurmConfig) -> dict[str, JobOptions]:
    options = {job: slurm.get_options_of_job(job) for job in ("trainer", format_cell_name(0))}
    evaluation = slurm.get_options_of_job(EVALUATION_CELL)
    if evaluation != options[format_cell_name(0)]:
        options[EVALUATION_CELL] = evaluation
    return options


def read_partition(partition_name: str) -> dict[str, str]:
    shown = run_slurm_command("scontrol", "show", "partition", partition_name, "--oneliner")
    return dict(re.findall(r"(\w+)=(\S+)", shown))


def judge_preemption(partition_or_qos: str, preempt_mode: str, grace_s: int) -> CheckResult:
    """Judge the effect of a job of higher priority on the jobs of a partition or QOS."""
    name, mode = f"preemption {partition_or_qos}", preempt_mode.split(",")[0]
    if mode in ("OFF", "DISABLED"):
        return ok(name, "jobs there are not preempted")
    if mode == "REQUEUE":
        return ok(name, f"a preempted job has {grace_s} s, and Slurm starts it again")
    if mode == "CANCEL" and grace_s:
        return ok(name, f"a preempted job has {grace_s} s, in which it asks for another start")
    if mode == "CANCEL":
        return warn(
            name,
            "a preempted job is cancelled at once: the run's caretaker submits it again",
            "ask the site for a GraceTime; a partition with PreemptMode=REQUEUE is better",
        )
    return warn(
        name,
        f"PreemptMode={mode}: a preempted job is suspended, and the run waits for it",
        "a partition with PreemptMode=REQUEUE lets the run go on elsewhere",
    )


def judge_submission_from_jobs(
    partition_name: str, submitting_nodes: str, slurm: SlurmConfig
) -> CheckResult:
    name = f"resubmission {partition_name}"
    if submitting_nodes == "ALL":
        return ok(name, "jobs may submit jobs")
    requeues = "no-requeue" not in slurm.sbatch
    kind = "that Slurm cannot requeue" if requeues else "that ends early (no-requeue)"
    return warn(
        name,
        f"only {submitting_nodes} may submit jobs: no job of the run submits one {kind}",
        "keep `areal-hpc caretaker RUN` running on one of those nodes (tmux, or a service)",
    )


def check_sbatch_accepts(subject: DoctorSubject) -> Iterator[CheckResult]:
    """Check by `sbatch --test-only`, which submits nothing, that Slurm accepts the jobs."""
    arguments_by_job: dict[str, tuple[str, ...]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for job, text in _render_sample_scripts(subject).items():
            path = Path(folder) / f"{job}.sbatch"
            path.write_text(text)
            arguments_by_job[job] = (str(path),)
        if not arguments_by_job:
            arguments_by_job = {
                job: (*get_sbatch_placement_flags(options), "--wrap=true")
                for job, options in get_sample_options(subject.slurm).items()
            }
        for job, arguments in arguments_by_job.items():
            try:
                run_slurm_command("sbatch", "--test-only", *arguments)
            except ClusterError as error:
                reason = error.problems[0].message.removeprefix("sbatch: ")
                yield fail(
                    f"job {job}",
                    f"sbatch rejects the job: {reason}",
                    "sacctmgr show assoc user=$USER format=account,partition,qos; sinfo -s",
                )
            else:
                yield ok(f"job {job}", "sbatch accepts the job (--test-only)")


def _render_sample_scripts(subject: DoctorSubject) -> dict[str, str]:
    scripts: dict[str, str] = {}
    for request in subject.job_requests:
        # Dependencies are left out: Slurm has no ids of those jobs yet. One cell stands for all.
        is_first_cell = is_training_cell_job(request.job) and not any(
            map(is_training_cell_job, scripts)
        )
        if is_first_cell or request.job in ("sft", "trainer", EVALUATION_CELL):
            lines = render_script(request).splitlines(keepends=True)
            scripts[request.job] = "".join(line for line in lines if "--dependency=" not in line)
    return scripts


def get_sbatch_placement_flags(options: JobOptions) -> tuple[str, ...]:
    """Return the sbatch options that decide whether Slurm accepts a job and on which nodes."""
    partition = (f"--partition={options.partition}",) if options.partition else ()
    flags = {name: value for name, value in options.sbatch.items() if name not in SHARE_FLAGS}
    return (*partition, *format_flags(flags))


def check_container(subject: DoctorSubject) -> Iterator[CheckResult]:
    container = subject.slurm.container
    if container.kind == "none":
        return
    if container.kind == "apptainer":
        program = shutil.which("apptainer") or shutil.which("singularity")
        hint = "srun -n1 which apptainer; a module load among slurm.setup"
        missing = "is not on this node; it may be on compute nodes"
        yield ok("apptainer", program) if program else warn("apptainer", missing, hint)
    elif "--container-image" in run_slurm_command("srun", "--help"):
        yield ok("pyxis", "srun knows --container-image")
    else:
        hint = "ask the administrators for pyxis, or container.kind=apptainer"
        yield fail("pyxis", "srun has no --container-image", hint)
    yield judge_commands_in_container(subject.slurm)
    yield from judge_gpus_by_task(subject.slurm)
    for image in sorted({container.train, container.serve}):
        image = spell_pyxis_image(image) if container.kind == "pyxis" else image
        is_file = image.startswith((".", "/")) or image.endswith(".sif")
        if is_file and Path(image).exists():
            yield ok("image", image)
        elif is_file:
            missing = f"there is no container image at {image}"
            yield fail("image", missing, "build it, or name another")


def judge_gpus_by_task(slurm: SlurmConfig) -> Iterator[CheckResult]:
    parts = (slurm, *slurm.jobs.values())
    names = [name for part in parts for flags in (part.sbatch, part.srun) for name in flags]
    if slurm.container.kind == "pyxis" and "gpus-per-task" in names:
        yield warn(
            "GPUs by task",
            "with --gpus-per-task only one task of a container of pyxis may see a GPU (pyxis#73)",
            "leave it out: a job asks for the GPUs of its nodes, and each task takes its own",
        )


def judge_commands_in_container(slurm: SlurmConfig) -> CheckResult:
    name = "Slurm in containers"
    if any("munge" in mount for mount in slurm.container.mounts):
        return ok(
            name, "munge is mounted: jobs can ask for another start if the image has scontrol"
        )
    return warn(
        name,
        "munge is not among container.mounts: a job that ends early cannot ask for another start",
        "mount /run/munge and Slurm's commands and configuration, or keep "
        "`areal-hpc caretaker RUN` running on a login node",
    )


_ASSOCIATION_COLUMNS = (
    *("account", "user", "partition", "defaultqos"),
    *("maxsubmitjobs", "grpsubmitjobs", "maxwall"),
)
_QOS_COLUMNS = ("name", "maxsubmitjobspu", "maxsubmitjobspa", "grpsubmitjobs", "maxwall")


@dataclass(frozen=True, slots=True)
class AccountingLimit:
    owner: str
    """Owner of the limit: `QOS normal`, `account physics`."""
    max_jobs: int | None
    max_minutes: int | None
    requests: tuple[JobRequest, ...]

    @property
    def wanted_jobs(self) -> int:
        # A run does without a caretaker behind its jobs if that exceeds the limit.
        return sum(request.job != CARETAKER_JOB for request in self.requests)


def check_accounting_limits(subject: DoctorSubject) -> Iterator[CheckResult]:
    enforced = subject.slurm_answer.settings.get("AccountingStorageEnforce", "").split(",")
    if not {"limits", "safe"}.intersection(enforced):
        yield ok("job limits", "this cluster enforces none")
        return
    queued = len(run_slurm_command("squeue", "--me", "--noheader", "--array").splitlines())
    limits = list(_find_limits_of_jobs(subject.job_requests))
    for limit in limits:
        if limit.max_jobs is not None:
            yield judge_job_limit(limit.owner, limit.max_jobs, limit.wanted_jobs, queued)
        for request in limit.requests:
            needed = request.shape.time_limit_minutes
            if limit.max_minutes is not None and needed > limit.max_minutes:
                yield fail(
                    f"time limit {request.job}",
                    f"the job asks for {needed} min; {limit.owner} allows {limit.max_minutes} min: "
                    "it is refused or never starts",
                    f"cluster.slurm.time_limit_minutes={limit.max_minutes}; the run continues in "
                    "the next job",
                )
    if not limits:
        yield ok("job limits", "none for your account and QOS")


def check_qos_preemption(subject: DoctorSubject) -> Iterator[CheckResult]:
    settings = subject.slurm_answer.settings
    sample_options = get_sample_options(subject.slurm).values()
    names = {options.sbatch.get("qos") for options in sample_options} - {None}
    if settings.get("PreemptType") != "preempt/qos" or not names:
        return
    for row in _query_sacctmgr_table("qos", ("name", "preemptmode", "gracetime")):
        if row["name"] in names:
            mode = row["preemptmode"].upper()
            if mode in ("", "CLUSTER"):
                mode = settings.get("PreemptMode", "OFF")
            grace_s = parse_slurm_time(row["gracetime"]) or 0
            yield judge_preemption(f"QOS {row['name']}", mode, grace_s)


def judge_job_limit(owner: str, max_jobs: int, wanted_jobs: int, queued_jobs: int) -> CheckResult:
    finding = f"{owner} allows {max_jobs} jobs at a time; the recipe submits {wanted_jobs}"
    if wanted_jobs > max_jobs:
        hint = "fewer cells, or another QOS"
        return fail("job limits", f"{finding}: sbatch refuses some, and so none is submitted", hint)
    if wanted_jobs + queued_jobs > max_jobs:
        hint = f"submit when {wanted_jobs + queued_jobs - max_jobs} have ended"
        return warn("job limits", f"{finding}, and {queued_jobs} of yours are there", hint)
    if wanted_jobs == max_jobs:
        return warn(
            "job limits",
            f"{finding}, so that no caretaker can wait behind them",
            "one cell fewer; else a person resumes the run when all of its jobs end at once",
        )
    return ok("job limits", finding)


def _find_limits_of_jobs(requests: Sequence[JobRequest]) -> Iterator[AccountingLimit]:
    user = getpass.getuser()
    default_account = _query_sacctmgr_table("user", ("defaultaccount",), f"name={user}")[0][
        "defaultaccount"
    ]
    account_by_job = {
        request.job: str(
            request.parameters["additional_parameters"].get("account", default_account)
        )
        for request in requests
    }
    accounts = ",".join(sorted(set(account_by_job.values())))
    default_qos: dict[str, str] = {}
    for row in _query_sacctmgr_table("assoc", _ASSOCIATION_COLUMNS, f"account={accounts}"):
        if row["user"] not in ("", user):
            continue
        if row["user"]:
            default_qos[row["account"]] = row["defaultqos"]
        matches = [
            request
            for request in requests
            if account_by_job[request.job] == row["account"]
            and row["partition"] in ("", request.parameters.get("partition"))
        ]
        number = row["maxsubmitjobs" if row["user"] else "grpsubmitjobs"]
        yield from _build_limits(f"account {row['account']}", number, row["maxwall"], matches)
    jobs_by_qos: dict[str, list[JobRequest]] = {}
    for request in requests:
        flags = request.parameters["additional_parameters"]
        own = str(flags.get("qos", default_qos.get(account_by_job[request.job], "")))
        partition_qos = _query_partition_qos(str(request.parameters.get("partition", "")))
        for name in {own, partition_qos} - {""}:
            jobs_by_qos.setdefault(name, []).append(request)
    for row in _query_sacctmgr_table("qos", _QOS_COLUMNS):
        matches, owner = jobs_by_qos.get(row["name"], []), f"QOS {row['name']}"
        yield from _build_limits(owner, row["maxsubmitjobspu"], row["maxwall"], matches)
        for column in ("maxsubmitjobspa", "grpsubmitjobs"):
            yield from _build_limits(owner, row[column], "", matches)


def _build_limits(
    owner: str, max_jobs_text: str, max_wall_text: str, requests: Sequence[JobRequest]
) -> Iterator[AccountingLimit]:
    max_jobs = int(max_jobs_text) if max_jobs_text.isdigit() else None
    max_s = parse_slurm_time(max_wall_text)
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
        return ""  # another check reports the unknown partition
    return "" if qos == "N/A" else qos
