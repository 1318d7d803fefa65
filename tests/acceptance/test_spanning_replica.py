"""A replica whose tensor-parallel ranks are on two nodes of a real Slurm, in a real run."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.commands import audit_of
from tests.support.devclusters import Devcluster, Submitting, devcluster
from tests.support.process_commands import find_processes, is_scheduler
from tests.support.run_files import events_of
from tests.support.waiting import wait_for

START_S = 300.0
"""A server's start, beside other work."""
SPANNING = (
    "inference.cells=1",
    "inference.tp=2",
    "inference.nodes_per_replica=2",
    "trainer.parallel.dp=1",
    "trainer.total_steps=8",
)

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Devcluster]:
    with devcluster(tmp_path / "cluster", "--nodes=3") as found:
        yield found
        found.cancel_all()


def second_scheduler(run: Submitting) -> psutil.Process:
    """SGLang's scheduler on the cell's second node, a descendant of the follower there."""
    (follower,) = find_processes(run.paths.jobs_dir / "cell-0" / "follower-1.json")
    (found,) = filter(is_scheduler, follower.children(recursive=True))
    return found


def test_a_run_goes_on_when_one_node_loses_its_part(
    cluster: Devcluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = Submitting(cluster, tmp_path / "runs")
    waiting = run.start("--wait", *SPANNING)
    request.addfinalizer(waiting.kill)  # where the test failed it would wait for good
    wait_for(lambda: len(events_of(run.paths, "weights_published")) >= 3, START_S)
    struck_at = time.time()
    second_scheduler(run).kill()
    wait_for(lambda: len(events_of(run.paths, "replica_ready")) == 2, START_S)
    (died,) = events_of(run.paths, "replica_died")
    assert died["time"] - struck_at < 30, died
    said, _ = waiting.communicate(timeout=600)
    assert waiting.returncode == 0, said
    assert "step      8/8" in said
    updates = events_of(run.paths, "weights_published")
    assert all(update["replicas"] == 1 and not update["failed"] for update in updates)
    logs = run.paths.logs_dir / "latest" / "cell-0" / "restart_00"
    parts = {f"replica-0.{start}{part}.log" for start in (1, 2) for part in ("", "-node-1")}
    assert {path.name for path in logs.glob("replica-*.log")} == parts
    heads = [(logs / f"{name}.log").read_text().split()[1] for name in ("driver-0", "follower-1")]
    assert heads[0] != heads[1], "on one node"
    assert "trained_once=32 duplicates=0 lost=0" in audit_of(run.paths.root, cluster.environ)
