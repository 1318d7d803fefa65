"""Checks of Slurm: commands, controller, partitions, accounts."""

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.launch.doctor.checks import CheckResult, fail, ok, warn
from areal_hpc.recipe.sections.cluster import JobOptions, SlurmConfig
from areal_hpc.rundir.rendezvous import EVALUATION_CELL, format_cell_name
from areal_hpc.slurm.commands import run_slurm_command

REQUIRED_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")


def check_slurm(slurm: SlurmConfig, scripts: Mapping[str, str]) -> Iterator[CheckResult]:
    """Checks of Slurm that need no job; `scripts`: those of a run by job, if there is a recipe."""
    missing = [name for name in REQUIRED_COMMANDS if shutil.which(name) is None]
    if missing:
        hint = "run this on a login node of the cluster; module load slurm on some"
        yield fail("commands", f"not found: {', '.join(missing)}", hint)
        return
    try:
        version = run_slurm_command("sbatch", "--version").strip()
        yield ok("commands", f"{version}: {', '.join(REQUIRED_COMMANDS)}")
        config = run_slurm_command("scontrol", "show", "config")
    except ClusterError as error:
        hint = "scontrol ping; Slurm's commands find the cluster by SLURM_CONF or /etc/slurm"
        yield fail("slurmctld", error.problems[0].message, hint)
        return
    yield ok("slurmctld", "answers")
    yield _check_accounting(config)
    yield from _check_partitions(slurm)
    yield from _check_sbatch_accepts(slurm, scripts)
    yield from _check_container(slurm)


def _check_accounting(config: str) -> CheckResult:
    found = re.search(r"^AccountingStorageType\s*= (\S+)", config, re.MULTILINE)
    if found and found[1].endswith("slurmdbd") and shutil.which("sacct"):
        return ok("accounting", "on: sacct tells what happened to jobs of long ago")
    return warn(
        "accounting",
        "off: Slurm forgets a job a few minutes after it ends",
        "nothing: submit, status, why, cancel and requeue work without it",
    )


def _list_job_options(slurm: SlurmConfig) -> dict[str, JobOptions]:
    """By a job of each kind that has options of its own."""
    found = {job: slurm.get_options(job) for job in ("trainer", format_cell_name(0))}
    evaluation = slurm.get_options(EVALUATION_CELL)
    if evaluation != found[format_cell_name(0)]:
        found[EVALUATION_CELL] = evaluation
    return found


def _check_partitions(slurm: SlurmConfig) -> Iterator[CheckResult]:
    limits: dict[str, int] = {}
    for options in _list_job_options(slurm).values():
        for name in (options.partition or "").split(","):
            if name:
                limits[name] = max(limits.get(name, 0), options.time_limit_minutes or 0)
    if not limits:
        yield ok("partition", "none named: Slurm's default")
    for name, time_limit_minutes in limits.items():
        try:
            shown = run_slurm_command("scontrol", "show", "partition", name, "--oneliner")
        except ClusterError:
            yield fail(f"partition {name}", "Slurm does not know it", "sinfo -s lists yours")
            continue
        facts = dict(re.findall(r"(\w+)=(\S+)", shown))
        yield _judge_partition(name, facts, time_limit_minutes)
        yield judge_preemption(name, facts)
        yield judge_resubmission(name, facts)


def _judge_partition(name: str, facts: Mapping[str, str], time_limit_minutes: int) -> CheckResult:
    what = f"{facts.get('TotalNodes', '?')} nodes, at most {facts.get('MaxTime', '?')}"
    if facts.get("State") != "UP":
        return fail(
            f"partition {name}", f"is {facts.get('State')}", "sinfo -s; name one that is up"
        )
    most_min = _parse_minutes(facts.get("MaxTime", ""))
    if most_min is not None and time_limit_minutes > most_min:
        hint = f"time_limit_minutes={most_min}; the run continues in the next job"
        return fail(
            f"partition {name}", f"{what}; the site asks for {time_limit_minutes} min", hint
        )
    return ok(f"partition {name}", f"up, {what}, PreemptMode={facts.get('PreemptMode', '?')}")


def judge_preemption(name: str, facts: Mapping[str, str]) -> CheckResult:
    """What happens to a job of the partition that a job of higher priority displaces.

    `facts` are those of `scontrol show partition`.
    """
    what, mode = f"preemption {name}", facts.get("PreemptMode", "OFF").split(",")[0]
    grace = facts.get("GraceTime", "0")
    grace_s = int(grace) if grace.isdigit() else 0
    if mode in ("OFF", "DISABLED"):
        return ok(what, "jobs there are not preempted")
    if mode == "REQUEUE":
        return ok(what, f"a preempted job has {grace_s} s, and Slurm starts it again")
    if mode == "CANCEL" and grace_s:
        return ok(what, f"a preempted job has {grace_s} s, in which it submits itself again")
    if mode == "CANCEL":
        return warn(
            what,
            "a preempted job is cancelled at once: another job of the run submits it again",
            "ask the site for a GraceTime; a partition with PreemptMode=REQUEUE is better",
        )
    return warn(
        what,
        f"PreemptMode={mode}: a preempted job is suspended, and the run waits for it",
        "a partition with PreemptMode=REQUEUE lets the run go on elsewhere",
    )


def judge_resubmission(name: str, facts: Mapping[str, str]) -> CheckResult:
    """Whether jobs of the partition may submit jobs."""
    from_nodes = facts.get("AllocNodes", "ALL")
    if from_nodes == "ALL":
        return ok(f"resubmission {name}", "jobs may submit jobs")
    return warn(
        f"resubmission {name}",
        f"only {from_nodes} may submit jobs: a job that Slurm cannot requeue is not started again",
        "keep slurm.requeue; `areal-hpc resume RUN` from one of those nodes submits what is gone",
    )


def _parse_minutes(text: str) -> int | None:
    """Minutes of `days-hours:minutes:seconds`; None for UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not found:
        return None
    days, hours, minutes = (int(part or 0) for part in found.groups()[:3])
    return (days * 24 + hours) * 60 + minutes


def _check_sbatch_accepts(slurm: SlurmConfig, scripts: Mapping[str, str]) -> Iterator[CheckResult]:
    """Would Slurm take the jobs? Asked with sbatch --test-only, which submits nothing."""
    asked: dict[str, tuple[str, ...]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for job, text in scripts.items():
            path = Path(folder) / f"{job}.sbatch"
            path.write_text(text)
            asked[job] = (str(path),)
        if not scripts:
            asked = {
                job: (*get_sbatch_flags(options), "--wrap=true")
                for job, options in _list_job_options(slurm).items()
            }
        for job, arguments in asked.items():
            try:
                run_slurm_command("sbatch", "--test-only", *arguments)
            except ClusterError as error:
                said = error.problems[0].message.removeprefix("sbatch: ")
                yield fail(
                    f"job {job}",
                    f"sbatch rejects the job: {said}",
                    "sacctmgr show assoc user=$USER format=account,partition,qos; sinfo -s",
                )
            else:
                yield ok(f"job {job}", "sbatch accepts the job (--test-only)")


def get_sbatch_flags(options: JobOptions) -> tuple[str, ...]:
    """The options of sbatch that decide whether it takes a job and where the job lands."""
    named = ("partition", "account", "qos", "constraint", "reservation")
    values = {name: getattr(options, name) for name in named}
    told = (f"--{name}={value}" for name, value in values.items() if value)
    return (*told, *(options.sbatch_flags or ()))


def _check_container(slurm: SlurmConfig) -> Iterator[CheckResult]:
    container = slurm.container
    if container.kind == "none":
        return
    if container.kind == "apptainer":
        found = shutil.which("apptainer") or shutil.which("singularity")
        hint = "srun -n1 which apptainer; a module load among slurm.setup"
        missing = "is not on this node; it may be on compute nodes"
        yield ok("apptainer", found) if found else warn("apptainer", missing, hint)
    elif "--container-image" in run_slurm_command("srun", "--help"):
        yield ok("pyxis", "srun knows --container-image")
    else:
        hint = "ask the administrators for pyxis, or container.kind=apptainer"
        yield fail("pyxis", "srun has no --container-image", hint)
    for image in {container.train, container.serve}:
        if image.startswith("/") and Path(image).exists():
            yield ok("image", image)
        elif image.startswith("/"):
            missing = f"there is no container image at {image}"
            yield fail("image", missing, "build it, or name another")
