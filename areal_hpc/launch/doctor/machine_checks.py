"""Checks of this machine: isolation of programs that the model writes, and the file root.

The file root needs POSIX semantics and space; a short job tests whether compute nodes share it.
"""

import fcntl
import os
import platform
import secrets
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from areal_hpc.errors import ArealError, ClusterError
from areal_hpc.launch.doctor.results import CheckResult, DoctorSubject, fail, ok, warn
from areal_hpc.launch.doctor.slurm_checks import get_sbatch_placement_flags
from areal_hpc.recipe.sections.cluster import JobOptions
from areal_hpc.rollout.execution.agent_sandboxes import check_sandbox_starts
from areal_hpc.rundir.jsonl import read_tail_lines
from areal_hpc.sandbox.program import check_programs_run
from areal_hpc.sandbox.runtimes import find_installed_runtimes
from areal_hpc.sandbox.seccomp import build_seccomp_filter
from areal_hpc.slurm.commands import run_slurm_command
from areal_hpc.slurm.queue import QueuePoller, is_live_state
from areal_hpc.slurm.states import explain_reason

PROCESS_LIMIT_KERNEL = (5, 14)
"""First kernel that counts a sandbox's processes apart from those of its user."""
_NO_LIMIT_BYTES = 1 << 60
"""Bound above which a limit means none: control groups of version 1 show a number near 2**63."""


def check_program_isolation(subject: DoctorSubject) -> Iterator[CheckResult]:
    """Start an empty program and, if the recipe's agents have sandboxes, a sandbox."""
    try:
        check_programs_run()
    except ArealError as error:
        problem = error.problems[0]
        finding = f"{problem.message} (only code_reward needs it)"
        yield warn("isolation", finding, problem.hint)
    else:
        yield ok("isolation", "programs of the model run in namespaces of their own here")
    recipe = subject.recipe
    if recipe is None or not recipe.rollout.agent.isolation:
        return
    try:
        check_sandbox_starts(recipe.rollout.agent.model_dump(mode="json"))
    except ArealError as error:
        finding = f"{error.problems[0].message} (on nodes of the run it may)"
        yield warn("isolation", finding, error.problems[0].hint)
    else:
        yield ok("isolation", "a sandbox of the recipe's agents starts")


def list_security_means(subject: DoctorSubject) -> Iterator[CheckResult]:
    runtimes = [name for name in find_installed_runtimes() if name != "none"]
    kernel = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    present, missing = [f"sandboxes of {', '.join(runtimes) or 'nothing'}"], []
    for is_present, means, consequence in (
        (has_user_namespaces(Path("/proc")), "user namespaces", "no sandbox starts"),
        (
            has_seccomp(Path("/proc"), platform.machine()),
            "a filter of system calls",
            "semaphores, queues and namespaces are open to commands",
        ),
        (
            kernel >= PROCESS_LIMIT_KERNEL,
            "a number of processes for each sandbox",
            "processes are counted twice a second",
        ),
        (
            has_memory_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")),
            "a control group's limit of memory",
            "what a sandbox takes between two looks, twice a second, is not held",
        ),
    ):
        if is_present:
            present.append(means)
        else:
            missing.append(f"not here: {means}; {consequence}")
    yield ok("means of isolation", "\n".join(["; ".join(present), *missing]))


def has_user_namespaces(proc_dir: Path) -> bool:
    return int(_read_text(proc_dir / "sys/user/max_user_namespaces") or 0) > 0


def has_seccomp(proc_dir: Path, machine: str) -> bool:
    is_known = build_seccomp_filter(machine) is not None
    return is_known and "\nSeccomp:" in (proc_dir / "self/status").read_text()


def has_memory_limit(membership: Path, cgroup_dir: Path) -> bool:
    """Return whether a control group of this process, or one above it, limits memory.

    Args:
        membership: File like `/proc/self/cgroup`, of version 1, 2 or both.
        cgroup_dir: Mount point of the control groups.
    """
    for line in membership.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            group = Path(name.lstrip("/"))
            for folder in (group, *group.parents):
                limit = _read_text(cgroup_dir / controllers / folder / file).strip()
                if limit.isdecimal() and int(limit) < _NO_LIMIT_BYTES:
                    return True
    return False


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


MIN_FREE_BYTES = 1 << 30
RECOMMENDED_FREE_BYTES = 50 << 30
MIN_FREE_INODES = 10_000
MAX_CLOCK_SKEW_S = 2.0
"""Maximum difference between a new file's time and this node's clock."""
LOCAL_FILE_SYSTEMS = {"ext2/ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlayfs", "overlay", "zfs"}
"""File systems that other nodes see only if this node exports them."""
JOB_TIMEOUT_S = 300.0
JOB_POLL_S = 2.0
FILE_VISIBLE_TIMEOUT_S = 60
"""Time until other nodes see a file: NFS caches directories for up to a minute."""

_VISIBILITY_SCRIPT = """#!/bin/bash
cd {folder} || exit 1
for try in $(seq {within_s}); do
  [ -e question ] && break
  sleep 1
done
cat question > .answer && hostname >> .answer && mv .answer answer
"""


def check_storage(subject: DoctorSubject) -> Iterator[CheckResult]:
    fileroot = subject.resolve_fileroot()
    try:
        fileroot.mkdir(parents=True, exist_ok=True)
        folder = fileroot / f".doctor.{socket.gethostname()}.{os.getpid()}"
        folder.mkdir()
    except OSError as error:
        yield fail(
            "file root",
            f"{fileroot} cannot be written: {error.strerror}",
            "cluster.fileroot=/a/path/on/shared/storage that you may write to",
        )
        return
    try:
        yield ok("file root", f"{fileroot} can be written")
        yield _check_rename(folder)
        probe = folder / "probe"
        probe.write_bytes(b"")
        yield _check_file_locks(probe)
        yield _check_clock(probe)
        yield _check_free_space(fileroot)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_shared_root(subject: DoctorSubject) -> Iterator[CheckResult]:
    """Check that other nodes see the file root, unless Slurm is not used."""
    fileroot = subject.resolve_fileroot()
    is_answering = not subject.slurm_answer.outage
    if subject.may_submit_storage_job and is_answering:
        options = subject.slurm.get_options_of_job("trainer")
        yield check_storage_by_job(fileroot, options, subject.print_line)
    elif (subject.involves_slurm or is_answering) and fileroot.exists():
        command = ["stat", "--file-system", "--format=%T", str(fileroot)]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        kind = completed.stdout.strip() or "unknown"
        finding = "cannot tell from this node whether it is shared"
        if kind in LOCAL_FILE_SYSTEMS:
            finding = "looks like a local file system"
        yield warn("shared", f"{kind}: {finding}", "--check-node tests it on a compute node")


def _check_rename(folder: Path) -> CheckResult:
    """Test renaming over a file, syncing a file and its folder, and exclusive creation."""
    old, new = folder / "old", folder / "new"
    try:
        old.write_bytes(b"old")
        with new.open("xb") as stream:
            stream.write(b"new")
            stream.flush()
            os.fsync(stream.fileno())
        new.rename(old)
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        is_replaced = old.read_bytes() == b"new" and not new.exists()
        try:
            old.open("xb").close()
            is_exclusive = False
        except FileExistsError:
            is_exclusive = True
    except OSError as error:
        hint = "use another file system: checkpoints and shards rely on atomic rename"
        return fail("rename, fsync", f"{error.strerror}", hint)
    if is_replaced and is_exclusive:
        return ok("rename, fsync", "rename is atomic; exclusive creation works")
    finding = "a rename did not replace a file, or a file was created twice"
    return fail("rename, fsync", finding, "use another file system")


def _check_clock(probe: Path) -> CheckResult:
    skew_s = probe.stat().st_mtime - time.time()
    finding = f"files are {skew_s:+.1f} s off this node's time"
    if abs(skew_s) <= MAX_CLOCK_SKEW_S:
        return ok("clock", finding)
    hint = "ask the administrators for time synchronization: ages in status will be wrong"
    return warn("clock", finding, hint)


def _check_file_locks(path: Path) -> CheckResult:
    with path.open("rb") as first, path.open("rb") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ok("locks", "flock works")
        except OSError as error:
            finding = f"flock does not work: {error.strerror}"
            hint = "mount it with locks (Lustre: -o flock); two launchers in a run are not noticed"
            return warn("locks", finding, hint)
    finding = "flock does not exclude a second process"
    return warn("locks", finding, "do not start the same run twice")


def _check_free_space(fileroot: Path) -> CheckResult:
    facts = os.statvfs(fileroot)
    free_bytes = facts.f_bavail * facts.f_frsize
    room = f"{free_bytes / (1 << 30):.0f} GiB free"
    if facts.f_files and facts.f_favail < MIN_FREE_INODES:
        return fail("room", f"{room}, but {facts.f_favail} inodes", "remove small files")
    if free_bytes < MIN_FREE_BYTES:
        return fail("room", room, "free some space, or choose another cluster.fileroot")
    if free_bytes < RECOMMENDED_FREE_BYTES:
        hint = "enough for small models; a checkpoint takes 14 bytes per parameter"
        return warn("room", room, hint)
    return ok("room", room)


def check_storage_by_job(
    fileroot: Path,
    options: JobOptions,
    print_line: Callable[[str], None],
    timeout_s: float = JOB_TIMEOUT_S,
) -> CheckResult:
    """Submit a job that copies a token from one file in the file root to another."""
    folder = fileroot / f".doctor-job.{secrets.token_hex(4)}"
    question, answer, token = folder / "question", folder / "answer", secrets.token_hex(16)
    script = _VISIBILITY_SCRIPT.format(
        folder=shlex.quote(str(folder)), within_s=FILE_VISIBLE_TIMEOUT_S
    )
    flags = ("--time=2", "--ntasks=1", *get_sbatch_placement_flags(options))
    job_id = ""
    try:
        folder.mkdir(parents=True)
        question.write_text(f"{token}\n")
        (folder / "job.sbatch").write_text(script)
        printed = run_slurm_command(
            *("sbatch", "--parsable", "--job-name=areal-hpc-doctor", *flags),
            *(f"--output={folder}/output", str(folder / "job.sbatch")),
        )
        job_id = printed.split(";")[0].strip()
        print_line(f"job {job_id} was submitted; waiting for its answer")
        await_answer(job_id, answer, timeout_s)
        copied_token, node = [*answer.read_text().split(), "?", "?"][:2]
    except TimeoutError as error:
        return warn("shared", str(error), "try again when nodes are free")
    except OSError as error:
        return fail("shared", f"{folder}: {error.strerror}", "choose another cluster.fileroot")
    except ClusterError as error:
        hint = error.problems[0].hint or "areal-hpc doctor without --check-node"
        return fail("shared", error.problems[0].message, hint)
    finally:
        if job_id:
            with suppress(ClusterError):
                run_slurm_command("scancel", "--quiet", job_id)
        shutil.rmtree(folder, ignore_errors=True)
    if copied_token != token:
        return fail("shared", f"{node} sees different content", "use another file system")
    reader = "the same node" if node == socket.gethostname() else node
    return ok("shared", f"{reader} saw the file, and its answer is visible here")


def await_answer(job_id: str, answer: Path, timeout_s: float) -> None:
    queue, waits_for = QueuePoller(), "it did not start"
    give_up_at, ended_at = time.monotonic() + timeout_s, None
    while time.monotonic() < give_up_at:
        if answer.exists():
            return
        snapshot = queue.poll([job_id])
        job = snapshot.jobs.get(job_id)
        if job and not is_live_state(job.state):
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > FILE_VISIBLE_TIMEOUT_S:
                output = read_tail_lines(answer.with_name("output"), 4096)
                raise ClusterError(
                    f"job {job_id} on {job.nodes or 'no node'} ended without an answer "
                    f"({job.state.name}): {output.decode(errors='replace').strip()}",
                    hint="name a file system that compute nodes mount at the same path: "
                    f"{answer.parent} may be another one there",
                )
        if job and job.reason:
            waits_for = explain_reason(job.reason).meaning
        time.sleep(max(JOB_POLL_S, queue.pause_s if snapshot.outage else 0.0))
    raise TimeoutError(f"job {job_id} gave no answer within {timeout_s / 60:.0f} min: {waits_for}")
