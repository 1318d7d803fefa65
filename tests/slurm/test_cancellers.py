"""Return of a job by who ended it: runs of a user who is not root."""

import pwd
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.slurm.supervised_jobs import SupervisedJob
from tests.support.devclusters import Devcluster, devcluster
from tests.support.environments import CHECKOUT

OWNER = "nobody"
NODES = 2
CELLS = ("cell-0", "cell-1", "cell-2")
PARTITION = "--partition=priority"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike those that pytest makes."""
    with tempfile.TemporaryDirectory(prefix="areal_hpc-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def cluster(folder: Path) -> Iterator[Devcluster]:
    """Nodes on which every user may run the Python of the tests."""
    with devcluster(folder / "cluster", f"--nodes={NODES}") as cluster:
        needed = {Path(folder).resolve() for folder in (sys.base_prefix, sys.prefix, CHECKOUT)}
        if script := build_opening_script(sorted(needed)):
            each = (f"--nodes={NODES}", "--ntasks-per-node=1")
            cluster.slurm("srun", PARTITION, *each, "sh", "-ec", script)
        yield cluster


def build_opening_script(folders: Sequence[Path]) -> str:
    """Write a script for a node that lets every user reach folders; empty if every user can.

    Where a home, such as root's, is closed, the node has another one in its place, with nothing in
    it but these folders.
    """
    closed = {folder: find_closed_folder(folder) for folder in folders}
    lines = []
    for home in sorted({home for home in closed.values() if home is not None}):
        inside = [folder for folder in folders if closed[folder] == home]
        lines.append("held=$(mktemp -d)")
        for number, folder in enumerate(inside):
            lines.append(f"mkdir $held/{number}; mount --bind {folder} $held/{number}")
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {home}")
        for number, folder in enumerate(inside):
            lines.append(f"mkdir -p {folder}; mount --move $held/{number} {folder}")
    return "\n".join(lines)


def find_closed_folder(folder: Path) -> Path | None:
    way = (*reversed(folder.parents), folder)
    return next((parent for parent in way if not parent.stat().st_mode & stat.S_IXOTH), None)


@pytest.mark.timeout(300)
def test_what_root_or_slurm_ended_comes_back_and_what_its_owner_ended_does_not(
    cluster: Devcluster, folder: Path
) -> None:
    mine = cluster.as_user(OWNER)
    trainer, unwanted, ended_by_root, ended_by_slurm = (
        SupervisedJob(mine, folder / "run", name, others=CELLS) for name in ("trainer", *CELLS)
    )
    failed = mine.slurm("sbatch", "--parsable", PARTITION, "--output=/dev/null", "--wrap=false")
    mine.await_end(failed)
    never = (f"--dependency=afterok:{failed}", "--kill-on-invalid-dep=yes")
    ended_by_slurm.submit("steady", PARTITION, only_now=never)
    ended_by_slurm.awaits_state("CANCELLED")
    for job in (unwanted, ended_by_root, trainer):
        job.submit("steady", PARTITION)
        job.awaits_words(1)
    mine.slurm("scancel", unwanted.job_id)
    cluster.slurm("scancel", ended_by_root.job_id)
    gone = [ended_by_root.job_id, ended_by_slurm.job_id]
    for job in (ended_by_root, ended_by_slurm):
        job.await_successor()
        job.awaits_words(1)
    cluster.slurm("scancel", trainer.job_id)  # cell-1 is the first that runs
    trainer.await_successor()
    assert read_canceller(cluster, unwanted.job_id) == f"CANCELLED by {pwd.getpwnam(OWNER).pw_uid}"
    assert [read_canceller(cluster, job) for job in gone] == ["CANCELLED by 0", "CANCELLED"]
    jobs = (trainer, unwanted, ended_by_root, ended_by_slurm)
    assert {job.name: [row["by"] for row in job.resubmissions()] for job in jobs} == {
        "trainer": ["cell-1"],
        "cell-0": [],
        "cell-1": ["trainer"],
        "cell-2": ["trainer"],
    }
    assert unwanted.newest_id() == unwanted.job_id


def read_canceller(cluster: Devcluster, job_id: str) -> str:
    return cluster.slurm("sacct", "-n", "-X", "-P", f"--jobs={job_id}", "--format=State")
