"""Jobs that are preempted, requeued, timed out, cancelled or put on a bad node, side by side."""

from collections.abc import Iterator

import pytest

from areal_hpc.rundir.jsonl import read_readable_records
from tests.slurm.supervised_jobs import MARGIN_S, STOP_GRACE_S, TIME_LIMIT_MIN, SupervisedJob
from tests.support.deadlines import scaled
from tests.support.devclusters import SLURM_POLL_S, Devcluster
from tests.support.waiting import wait_for

Jobs = dict[str, SupervisedJob]
SAFE = ("--partition=priority", "--requeue")

JOIN_TIMEOUT_S = scaled(8.0)


@pytest.fixture(scope="module")
def jobs(shared: Devcluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """A job for every situation, all at work side by side: most of the time is Slurm's."""
    root = tmp_path_factory.mktemp("runs")
    names = (
        *("lost", "timed", "bad_node", "crashing", "refusing", "finished", "too_short"),
        *("preempted", "requeued", "cancelled", "unwanted", "dependent", "idle", "apart", "moved"),
    )
    jobs = {name: SupervisedJob(shared, root / name, name) for name in names}
    jobs["lost"].submit("steady", *SAFE)
    jobs["timed"].submit("slow_saver", *SAFE, f"--time={TIME_LIMIT_MIN}", "--nodelist=n04")
    jobs["lost"].awaits_words(1)
    shared.done("kill-node", "n01", "--only-slurmd")  # where it is, and nothing else

    scratch = root / "scratch"
    scratch.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(scratch))
    shared.slurm("srun", "-p", "priority", "-w", "n02", *mount)
    not_n01 = "--exclude=n01"
    # Before all others: of nodes that are as idle it gets the first.
    others = "--exclude=n01,n04"
    jobs["bad_node"].submit("finish", *SAFE, others, f"--export=ALL,SLURM_TMPDIR={scratch}")
    jobs["crashing"].submit("crash", *SAFE, not_n01)
    jobs["refusing"].submit("refuse", *SAFE, not_n01)
    marker = jobs["finished"].run.finished_marker
    marker.parent.mkdir()
    marker.touch()
    jobs["finished"].submit("steady", *SAFE, not_n01, done_marker=str(marker))
    low = ("--partition=scavenger", "--requeue", "--nodes=2", "--nodelist=n02,n03")
    jobs["preempted"].submit("steady", *low, "--cpus-per-task=8", tasks=2, margin_s=scaled(2.0))
    unshared = jobs["apart"].root
    unshared.mkdir()
    hide = ("mount", "-t", "tmpfs", "tmpfs", str(unshared))
    shared.slurm("srun", "-p", "priority", "-w", "n04", *hide)
    rest = (*SAFE, "--nodes=2", "--exclude=n01,n02")
    jobs["apart"].submit("steady", *rest, tasks=2, join_timeout_s=JOIN_TIMEOUT_S)
    jobs["idle"].submit("idle_once", *SAFE, not_n01)
    jobs["idle"].lay_caretaker(*SAFE, not_n01)
    jobs["too_short"].submit("steady", *SAFE, not_n01, "--time=1", margin_s=60.0)
    jobs["requeued"].submit("steady", *SAFE, not_n01)
    jobs["cancelled"].submit("steady", *SAFE, not_n01)
    jobs["moved"].submit("steady", *SAFE, not_n01)
    jobs["unwanted"].submit("steady", "--partition=priority", "--no-requeue", not_n01)
    jobs["unwanted"].lay_caretaker(*SAFE, not_n01)
    after_it = f"--dependency=afterok:{jobs['unwanted'].job_id}"
    jobs["dependent"].submit("finish", *SAFE, after_it, "--kill-on-invalid-dep=no")
    yield jobs
    shared.restore()


def test_a_preempted_job_saves_once_and_goes_on_under_its_number(jobs: Jobs) -> None:
    job = jobs["preempted"]
    job.awaits_words(2)
    assert all(word.startswith("began 1 at 10.") for word in job.words), job.words
    high = job.cluster.submit("sleep 1", "-p", "priority", "-w", "n03", "-c", "10", "--mem=100")
    job.cluster.await_state(high, "COMPLETED")
    job.awaits_words(6)
    assert sorted(job.words[2:4]) == ["saved 0", "saved 1"]
    assert all(word.startswith("began 2 at 10.") for word in job.words[4:]), job.words
    assert job.restarts() == 1
    (requeued,) = read_readable_records(job.run.events)
    assert requeued["reason"] == "preempted by a job of higher priority"
    folder = job.run.log_dir(1) / "preempted"
    assert {path.name for path in folder.iterdir()} == {"restart_00", "restart_01"}
    headline = (folder / "restart_01" / "preempted-1.log").read_text().splitlines()[0]
    assert headline == f"node n03 job {job.job_id} restart 1"
    job.cluster.slurm("scancel", job.job_id)


def test_a_job_that_slurm_requeues_is_not_requeued_twice(jobs: Jobs) -> None:
    job = jobs["requeued"]
    job.awaits_words(1)
    job.cluster.slurm("scontrol", "requeue", job.job_id)
    job.awaits_words(3)
    assert job.words[1] == "saved 0"
    assert (job.starts(), job.restarts()) == (2, 1)
    job.cluster.slurm("scancel", job.job_id)
    job.awaits_state("CANCELLED")
    job.awaits(lambda: job.outcome().reason.endswith("(ended by Slurm)"))
    assert (job.starts(), job.restarts()) == (2, 1)


def test_a_job_whose_run_was_moved_away_says_so_and_ends(jobs: Jobs) -> None:
    job = jobs["moved"]
    job.awaits_words(1)
    elsewhere = job.root.with_name("elsewhere")
    job.root.rename(elsewhere)
    wait_for(lambda: job.state() == "FAILED", every_s=SLURM_POLL_S)
    assert not job.root.exists(), "nothing makes it anew"
    (log,) = elsewhere.glob("jobs/moved/*_log.out")
    assert f"the run's folder {job.root} is gone: it was moved or removed" in log.read_text()
    elsewhere.rename(job.root)
    assert (job.starts(), job.restarts()) == (1, 0)


def test_a_job_of_a_cancelled_run_stops_at_a_signal_and_stays_away(jobs: Jobs) -> None:
    job = jobs["cancelled"]
    job.awaits_words(1)
    job.run.cancelled_marker.touch()
    job.cluster.slurm("scancel", "--signal=USR2", job.job_id)
    job.awaits_state("CANCELLED")
    assert job.words[1] == "saved 0"
    assert job.outcome().reason == "stopped by a signal (cancelled)"
    assert job.starts() == 1


def test_a_job_that_slurm_may_not_requeue_is_submitted_by_the_caretaker_behind_it(
    jobs: Jobs,
) -> None:
    job, waiting = jobs["unwanted"], jobs["dependent"]
    job.awaits_words(1)
    job.cluster.slurm("scancel", "--signal=TERM", job.job_id)
    job.awaits_words(3)
    assert job.told[2] == "began 2"
    assert job.newest_id() != job.job_id
    assert job.cluster.job_state(job.newest_id()) == "RUNNING"
    assert waiting.state() == "PENDING", "it waits for the new number"
    awaited = ("squeue", "-h", "-j", waiting.job_id, "-o", "%E")
    new = f"afterok:{job.newest_id()}"
    waiting.awaits(lambda: waiting.cluster.slurm(*awaited).startswith(new))
    waiting.cluster.slurm("scancel", waiting.job_id)
    job.cluster.slurm("scancel", job.newest_id())


def test_crashes_are_forgiven_while_the_run_gets_further(jobs: Jobs) -> None:
    job = jobs["crashing"]
    job.awaits_state("FAILED")
    # The first start got further, the second may have had bad luck, the third is one too many.
    assert job.words == ["crashed 1", "crashed 2", "crashed 3"]
    assert job.outcome().exit_code == 128 + 11


def test_a_mistake_in_the_recipe_ends_the_job(jobs: Jobs) -> None:
    job = jobs["refusing"]
    job.awaits_state("FAILED")
    assert (job.words, job.starts()) == (["refused"], 1)


def test_a_job_whose_work_is_done_says_so_at_once(jobs: Jobs) -> None:
    job = jobs["finished"]
    job.awaits_state("COMPLETED")
    assert job.words == []


def test_the_time_limit_is_met_with_a_save_and_another_start(jobs: Jobs) -> None:
    job = jobs["timed"]
    job.awaits_words(3)
    assert job.told[:2] == ["began 1", "stopped"]
    reason, _, left = job.words[2].partition(": ")
    assert reason == "close to the time limit"
    # Those to stop, and eight to save, of which the look took some; others are kept free.
    wanted_s = STOP_GRACE_S + 8
    assert wanted_s - MARGIN_S <= int(left.removesuffix(" s")) <= wanted_s + 0.5
    job.awaits(lambda: "began 2" in job.told)
    assert job.restarts() >= 1
    job.cluster.slurm("scancel", job.job_id)


def test_a_time_limit_below_the_start_up_ends_the_job_after_three_starts(jobs: Jobs) -> None:
    job = jobs["too_short"]
    job.awaits_state("FAILED")
    assert job.starts() == 3
    assert job.outcome().gave_up
    assert "3 starts in a row reached the time limit" in job.outcome().reason


def test_an_idle_job_gives_its_nodes_back_and_is_submitted_again(jobs: Jobs) -> None:
    job = jobs["idle"]
    job.awaits_state("FAILED")
    job.awaits(lambda: "began 2" in job.told)
    assert job.told == ["began 1", "began 2"]
    job.awaits(lambda: job.cluster.job_state(job.newest_id()) == "COMPLETED")
    (again,) = job.resubmissions()
    assert again["reason"] == "idle had released its nodes"


def test_a_bad_node_is_named_and_left(jobs: Jobs) -> None:
    job = jobs["bad_node"]
    job.awaits_state("COMPLETED")
    assert job.words == ["done on n03"]
    assert list(job.excluded()) == ["n02"]
    assert "scratch has 1 MiB free, expected at least 64 MiB" in job.excluded()["n02"]
    excluded = job.shown().split(" ExcNodeList=")[1].split()[0]
    named = job.cluster.slurm("scontrol", "show", "hostnames", excluded).split()
    assert sorted(named) == ["n01", "n02", "n04"], "what was asked for at first is kept"


def test_a_node_without_the_shared_storage_is_named_by_the_others(jobs: Jobs) -> None:
    job = jobs["apart"]
    job.awaits(lambda: bool(job.excluded()))
    reason = f"no task on this node joined within {JOIN_TIMEOUT_S:.0f} s"
    message = f"n04: {reason}; is {job.files.root} mounted there?"
    assert job.excluded() == {"n04": message}
    job.awaits(lambda: job.restarts() == 1)
    job.awaits(lambda: "ExcNodeList=n[01-02],n04 " in job.shown())
    assert job.words == [], "nothing was begun without it"
    job.cluster.slurm("scancel", job.job_id)


def test_a_task_on_a_lost_node_gives_way_to_the_jobs_next_start(jobs: Jobs) -> None:
    job = jobs["lost"]
    job.awaits(lambda: "began 2" in job.told)
    job.awaits(lambda: "saved 0" in job.words)  # by the first start, which Slurm has lost
    assert (job.starts(), job.restarts()) == (2, 1)
    job.cluster.slurm("scancel", job.job_id)
