"""Resubmission of lost jobs by the caretakers of the jobs that live."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from areal_hpc.jobs.caretaker import look_after_run
from tests.slurm.supervised_jobs import SupervisedJob
from tests.support.commands import write_program
from tests.support.deadlines import scaled
from tests.support.devclusters import Devcluster
from tests.support.thoroughness import choose

CELLS = ("cell-0", "cell-1")
SAFE, AT_RISK = "--partition=priority", "--partition=scavenger"


def drained_nodes(cluster: Devcluster) -> set[str]:
    """List drained nodes once each, though every node is in two partitions."""
    return set(cluster.slurm("sinfo", "-hN", "--states=drain", "-o", "%N").split())


@pytest.fixture
def failing_prolog(cluster: Devcluster, tmp_path: Path) -> Iterator[None]:
    """The cluster, where the next start of a job fails, as at a site's health check."""
    conf = Path(cluster.environ["SLURM_CONF"])
    prolog = write_program(tmp_path / "prolog.sh", f"! mkdir {tmp_path}/failed 2>/dev/null")
    tmp_path.chmod(0o755)
    before = conf.read_text()
    conf.write_text(f"{before}\nProlog={prolog}\n")
    cluster.slurm("scontrol", "reconfigure")
    yield
    conf.write_text(before)
    cluster.slurm("scontrol", "reconfigure")
    for node in drained_nodes(cluster):
        cluster.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")


def make_jobs(cluster: Devcluster, root: Path) -> list[SupervisedJob]:
    names = ("trainer", *CELLS)
    return [SupervisedJob(cluster, root, name, others=CELLS) for name in names]


def preempt(cluster: Devcluster, job: SupervisedJob) -> None:
    cluster.submit("sleep 5", SAFE, "--exclusive", f"--nodelist={job.nodes()}")
    job.awaits_state("PREEMPTED")


@pytest.mark.timeout(300)
def test_what_slurm_cancels_or_cannot_start_is_submitted_again(
    cancelling: Devcluster, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    trainer, lost, preempted = make_jobs(cancelling, root)
    trainer.submit("steady", AT_RISK, only_now=("--nodelist=n01",))
    trainer.awaits_words(1)
    hide = ("mount", "-t", "tmpfs", "tmpfs", str(root))
    cancelling.slurm("srun", SAFE, "--nodelist=n04", *hide)
    elsewhere = "--exclude=n01"
    # Its successor is safe: on the node of the next job it would keep that from being preempted.
    apart = f"{elsewhere},n02"
    lost.submit("steady", SAFE, apart, "--no-requeue", only_now=("--nodelist=n04",))
    preempted.submit("steady", AT_RISK, elsewhere, only_now=("--nodelist=n02",))
    preempted.awaits_words(1)
    preempt(cancelling, preempted)
    preempted.await_successor()
    lost.await_successor()
    lost.awaits_words(1)
    assert lost.excluded() == {"n04": "cell-0 ended there before its first task started"}
    assert "n04" not in lost.nodes()
    before = trainer.job_id
    waiting = cancelling.submit("true", f"--dependency=afterok:{before}")
    preempt(cancelling, trainer)
    trainer.await_successor()
    dependency = cancelling.slurm("squeue", "-h", "-j", waiting, "-o", "%E")
    assert dependency.startswith(f"afterok:{trainer.job_id}"), (before, dependency)
    for job in (trainer, lost, preempted):
        assert len(job.resubmissions()) == 1, job.name
    names = cancelling.slurm("squeue", "-h", "-t", "R", "-o", "%j").split()
    prefixes = f"{trainer.run.queue_name}-"
    running = sorted(
        name.partition(".")[0].removeprefix(prefixes) for name in names if name != "wrap"
    )
    assert running == [*CELLS, "trainer"]
    cancelling.slurm("scancel", waiting)
    cancelling.slurm("srun", SAFE, "--nodelist=n04", "umount", str(root))


@pytest.mark.timeout(200)
def test_a_job_that_slurm_calls_completed_before_its_tasks_began_is_submitted_again(
    cluster: Devcluster, tmp_path: Path
) -> None:
    trainer, cell, _ = make_jobs(cluster, tmp_path / "run")
    trainer.submit("steady", SAFE, "--nodelist=n01")
    trainer.awaits_words(1)
    was_there = tmp_path / "run" / "container"
    dies_once = f"[ -e {was_there} ] || {{ touch {was_there}; exit 0; }}"
    cell.submit("steady", SAFE, setup=(dies_once,), only_now=("--nodelist=n02",))
    cell.awaits_state("COMPLETED")
    cell.await_successor()
    cell.awaits_words(1)
    assert cell.excluded() == {"n02": "cell-0 ended there before its first task started"}
    assert len(cell.resubmissions()) == 1


@pytest.mark.timeout(200)
def test_what_a_person_cancelled_stays_away_and_the_third_return_is_the_last(
    cancelling: Devcluster, tmp_path: Path
) -> None:
    trainer, unwanted, luckless = make_jobs(cancelling, tmp_path / "run")
    trainer.submit("steady", SAFE, "--nodelist=n01")
    unwanted.submit("steady", SAFE, "--nodelist=n01")
    luckless.submit("steady", AT_RISK, "--exclude=n01")
    for job in (trainer, unwanted, luckless):
        job.awaits_words(1)
    cancelling.slurm("scancel", unwanted.job_id)
    for _ in range(3):
        preempt(cancelling, luckless)
        luckless.await_successor()
    preempt(cancelling, luckless)
    luckless.awaits(lambda: luckless.events_named("job_given_up") != [])
    assert luckless.newest_id() == luckless.job_id
    assert unwanted.resubmissions() == []
    assert unwanted.newest_id() == unwanted.job_id


def test_a_full_disk_keeps_no_job_from_another_start(cluster: Devcluster, tmp_path: Path) -> None:
    job = SupervisedJob(cluster, tmp_path / "run", "filled")
    held = ("--hold", "--nodelist=n03")
    job.submit("steady", SAFE, "--requeue", only_now=held, least_free_bytes=1)
    root = job.root

    def on_node(script: str) -> None:
        cluster.slurm("srun", SAFE, "--nodelist=n03", "sh", "-c", script)

    mount = f"mount -t tmpfs -o size=4m tmpfs {root}"
    on_node(f"cp -a {root} {root}.all && {mount} && cp -a {root}.all/. {root}")
    cluster.slurm("scontrol", "release", job.job_id)
    on_node(f"until grep -q began {root}/filled.txt; do sleep 0.2; done")
    on_node(f"cat /dev/zero > {root}/filling || true")
    cluster.slurm("scancel", "--signal=TERM", job.job_id)
    job.awaits(lambda: job.restarts() == 1)
    cluster.slurm("scancel", job.job_id)
    on_node(f"umount --lazy {root}")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("held", choose(["trainer", "cell-0"], "trainer"))
def test_a_job_that_a_prolog_kept_from_starting_starts_elsewhere(
    cluster: Devcluster, tmp_path: Path, request: pytest.FixtureRequest, held: str
) -> None:
    trainer, cell, _ = make_jobs(cluster, tmp_path / "run")
    late, early = (trainer, cell) if held == "trainer" else (cell, trainer)
    early.submit("steady", SAFE, "--nodelist=n01")
    early.awaits_words(1)
    request.getfixturevalue("failing_prolog")
    late.submit("steady", SAFE, "--exclude=n01")
    late.awaits_words(1)
    (drained,) = drained_nodes(cluster)
    assert late.excluded() == {drained: f"{drained}: Prolog error"}
    assert drained not in late.nodes()
    (released,) = late.events_named("job_released")
    assert (released["job_id"], released["excluded"]) == (late.job_id, [drained])


@pytest.mark.timeout(200)
def test_jobs_without_commands_of_slurm_are_brought_back_from_a_login_node(
    cluster: Devcluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SupervisedJob(cluster, tmp_path / "run", "trainer")
    image = tmp_path / "bin"  # what an image without Slurm has
    image.mkdir()
    for name in ("sh", "bash", "env"):
        image.joinpath(name).symlink_to(str(shutil.which(name)))
    call_srun = f'srun() {{ {shutil.which("srun")} "$@"; }}'
    job.submit("steady", SAFE, "--no-requeue", setup=(call_srun, f"export PATH={image}"))
    job.lay_caretaker(SAFE, "--hold")  # its node may not submit jobs
    job.awaits_words(1)
    monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
    output: list[str] = []
    looking = Thread(target=look_after_run, args=(job.run, output.append, 1.0))
    looking.start()
    job.kill_process()
    job.await_successor()
    job.awaits(lambda: "began 2" in job.told)
    assert output == [f"trainer ended with an error; submitted again as job {job.job_id}"]
    job.let_go()
    looking.join(scaled(60))
    assert not looking.is_alive()
    assert job.state() == "COMPLETED"


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_run_all_of_whose_jobs_are_cancelled_at_once_comes_back_again_and_again(
    cancelling: Devcluster, tmp_path: Path
) -> None:
    trainer, cell, unwanted = jobs = make_jobs(cancelling, tmp_path / "run")
    for job in jobs:
        job.submit("steady", AT_RISK)
        job.awaits_words(1)
    waiting = trainer.lay_caretaker(AT_RISK)
    cancelling.slurm("scancel", unwanted.job_id)
    unwanted.awaits_state("CANCELLED")
    for start in (2, 3):
        cancelling.submit("sleep 3", SAFE, "--exclusive", "--nodes=4")
        for job in (trainer, cell):
            job.awaits_state("PREEMPTED")
        for job in (trainer, cell):
            job.await_successor()
            job.awaits(lambda job=job, word=f"began {start}": word in job.told)  # type: ignore[misc]
        before, waiting.job_id = waiting.job_id, waiting.newest_id()
        assert waiting.job_id != before
        assert [row["by"] for row in trainer.resubmissions()] == ["caretaker"] * (start - 1)
    for job in (trainer, cell):
        job.let_go()
    waiting.awaits_state("CANCELLED")
    assert unwanted.newest_id() == unwanted.job_id
