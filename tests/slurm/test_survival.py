"""Jobs that are preempted, requeued, timed out, cancelled or put on a bad node, side by side."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm.devclusters import Devcluster, devcluster, wait_for
from tests.slurm.supervised_jobs import SupervisedJob

RESTART_S = 40.0
"""Within this a requeued job runs again on a busy machine: six seconds are Slurm's."""
STEADY = ("--partition=priority", "--requeue")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    place = tmp_path_factory.mktemp("cluster") / "state"
    with devcluster(place, "--nodes=3", "--grace-s=15") as found:
        yield found
        found.cancel_all()


@pytest.fixture
def job(cluster: Devcluster, tmp_path: Path, request: pytest.FixtureRequest) -> SupervisedJob:
    return SupervisedJob(cluster, tmp_path, "job")


def awaited(job: SupervisedJob, condition: Callable[[], bool], within_s: float = RESTART_S) -> None:
    try:
        wait_for(condition, within_s)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.explain()}") from None


def test_a_preempted_job_saves_once_and_goes_on_under_its_number(job: SupervisedJob) -> None:
    nodes = ("--nodes=2", "--nodelist=n02,n03", "--cpus-per-task=10")
    job.submit("steady", "--partition=scavenger", "--requeue", *nodes, tasks=2)
    awaited(job, lambda: len(job.words) == 2)
    assert all(word.startswith("began 1 at 10.") for word in job.words), job.words
    high = job.cluster.submit("sleep 1", "-p", "priority", "-w", "n03", "-c", "10", "--mem=100")
    awaited(job, lambda: job.cluster.job_state(high) == "COMPLETED")
    awaited(job, lambda: len(job.words) == 6)
    assert sorted(job.words[2:4]) == ["saved 0", "saved 1"]
    assert all(word.startswith("began 2 at 10.") for word in job.words[4:]), job.words
    assert job.restarts() == 1
    folder = job.root / "logs" / "job"
    assert {path.name for path in folder.iterdir()} == {"restart_00", "restart_01"}
    headline = (folder / "restart_01" / "process-1.log").read_text().splitlines()[0]
    assert headline == f"node n03 job {job.job_id} restart 1"
    job.cluster.slurm("scancel", job.job_id)


def test_a_job_that_slurm_requeues_is_not_requeued_twice(job: SupervisedJob) -> None:
    job.submit("steady", *STEADY)
    awaited(job, lambda: len(job.words) == 1)
    job.cluster.slurm("scontrol", "requeue", job.job_id)
    awaited(job, lambda: len(job.words) == 3)
    assert job.words[1] == "saved 0"
    assert (job.starts(), job.restarts()) == (2, 1)
    job.cluster.slurm("scancel", job.job_id)
    awaited(job, lambda: job.state() == "CANCELLED")
    awaited(job, lambda: job.outcome().reason.endswith("(ended by Slurm)"))
    assert (job.starts(), job.restarts()) == (2, 1)


def test_a_job_of_a_cancelled_run_stops_at_a_signal_and_stays_away(job: SupervisedJob) -> None:
    job.submit("steady", *STEADY)
    awaited(job, lambda: len(job.words) == 1)
    job.cancelled.touch()
    job.cluster.slurm("scancel", "--signal=USR2", job.job_id)
    awaited(job, lambda: job.state() == "FAILED")
    assert job.words[1] == "saved 0"
    assert job.outcome().reason == "stopped by a signal (cancelled)"
    assert job.starts() == 1


def test_a_job_that_slurm_may_not_requeue_submits_itself_again(job: SupervisedJob) -> None:
    job.submit("steady", "--partition=priority", "--no-requeue")
    awaited(job, lambda: len(job.words) == 1)
    job.cluster.slurm("scancel", "--signal=TERM", job.job_id)
    awaited(job, lambda: len(job.words) == 3)
    assert job.words[2].startswith("began 2 at ")
    assert job.newest_id() != job.job_id
    assert job.cluster.job_state(job.newest_id()) == "RUNNING"
    job.cluster.slurm("scancel", job.newest_id())


def test_crashes_are_forgiven_while_the_run_gets_further(job: SupervisedJob) -> None:
    job.submit("crash", *STEADY)
    awaited(job, lambda: job.state() == "FAILED", 90)
    # The first start got further, the second may have had bad luck, the third is one too many.
    assert job.words == ["crashed 1", "crashed 2", "crashed 3"]
    assert job.outcome().exit_code == 128 + 11


def test_a_mistake_in_the_recipe_ends_the_job(job: SupervisedJob) -> None:
    job.submit("refuse", *STEADY)
    awaited(job, lambda: job.state() == "FAILED")
    assert (job.words, job.starts()) == (["refused"], 1)


def test_a_job_whose_work_is_done_says_so_at_once(job: SupervisedJob) -> None:
    marker = job.root / "FINISHED"
    marker.touch()
    job.submit("steady", *STEADY, done_marker=str(marker))
    awaited(job, lambda: job.state() == "COMPLETED")
    assert job.words == []


def test_the_time_limit_is_met_with_a_save_and_another_start(job: SupervisedJob) -> None:
    job.submit("slow_saver", *STEADY, "--time=1")
    awaited(job, lambda: len(job.words) >= 3, 90)
    assert job.words[:2] == ["began", "stopped"]
    reason, _, left = job.words[2].partition(": ")
    assert reason == "the time limit is near"
    # Six seconds to stop and eight to save, of which the look took up to two; five are kept free.
    assert 9 <= int(left.removesuffix(" s")) <= 14
    awaited(job, lambda: job.words.count("began") == 2)
    assert job.restarts() == 1
    job.cluster.slurm("scancel", job.job_id)


def test_a_bad_node_is_named_and_left(job: SupervisedJob) -> None:
    scratch = job.root / "scratch"
    scratch.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(scratch))
    job.cluster.slurm("srun", "-p", "priority", "-w", "n01", *mount)
    only_two = ("--exclude=n03", f"--export=ALL,SLURM_TMPDIR={scratch}")
    job.submit("finish", *STEADY, *only_two)
    awaited(job, lambda: job.state() == "COMPLETED", 60)
    assert job.words == ["done on n02"]
    assert list(job.excluded()) == ["n01"]
    assert "scratch has 1 MiB free, expected at least 64 MiB" in job.excluded()["n01"]
    shown = job.cluster.slurm("scontrol", "show", "job", job.job_id, "--oneliner")
    assert "ExcNodeList=n[01,03]" in shown
    job.cluster.slurm("srun", "-p", "priority", "-w", "n01", "umount", str(scratch))


def test_a_task_on_a_lost_node_gives_way_to_the_jobs_next_start(job: SupervisedJob) -> None:
    job.submit("steady", *STEADY)
    awaited(job, lambda: len(job.words) == 1)
    shown = job.cluster.slurm("scontrol", "show", "job", job.job_id, "--oneliner")
    lost = shown.split(" NodeList=")[1].split()[0]
    job.cluster.done("kill-node", lost, "--only-slurmd")
    awaited(job, lambda: any(word.startswith("began 2") for word in job.words), 90)
    awaited(job, lambda: "saved 0" in job.words)  # by the first start, which Slurm has lost
    assert (job.starts(), job.restarts()) == (2, 1)
    job.cluster.done("restore-node", lost)
    job.cluster.slurm("scancel", job.job_id)
