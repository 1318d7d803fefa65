"""A rank that dies is started again with those of the other nodes, within the living job."""

import signal
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_hpc.rundir.jobs import LaunchFile
from areal_hpc.rundir.jsonl import read_readable_records
from tests.slurm.supervised_jobs import SupervisedJob
from tests.support.devclusters import Devcluster

RESTARTS = 2


@dataclass
class RankJob(SupervisedJob):
    """A job with a forked rank a task."""

    def launch(self, function: str, tasks: int = 1, **slurm: object) -> LaunchFile:
        launch = super().launch(function, tasks, **slurm)
        (process,) = launch.job.processes
        rank = msgspec.structs.replace(process, is_forked=True, is_rank=True, restarts=RESTARTS)
        job = msgspec.structs.replace(launch.job, processes=[rank])
        return msgspec.structs.replace(launch, job=job)


def test_ranks_start_again_on_their_nodes_and_then_slurm_is_asked(
    cluster: Devcluster, tmp_path: Path
) -> None:
    job = RankJob(cluster, tmp_path / "run", "ranks")
    job.submit("dying_rank", "--partition=priority", "--requeue", "--nodes=2", tasks=2)
    job.awaits(lambda: job.told.count("done") == 2)
    first, last = job.words[: 2 * (1 + RESTARTS)], job.words[2 * (1 + RESTARTS) :]
    assert {word.partition(" at ")[0] for word in first} == {"began 1"}
    assert len(set(first)) == 2, "each time on the same two nodes"
    assert sorted(word.partition(" at ")[0] for word in last) == ["began 2"] * 2 + ["done"] * 2
    assert job.restarts() == 1, "after the last death that is answered within the job"
    events = read_readable_records(job.run.events)
    died = [event for event in events if event["event"] == "process_exited"]
    # Rank 0, which is told of the end of rank 1 by nothing but its supervisor, is no cause.
    assert [event["exit_code"] for event in died] == [128 + signal.SIGKILL] * (1 + RESTARTS)
    assert sum(event["event"] == "ranks_restarted" for event in events) == RESTARTS
