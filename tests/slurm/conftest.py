"""Devcluster that tests share: its start takes longer than most tests."""

from collections.abc import Iterator

import pytest

from slurm.devcluster.roots import list_unpacked_versions
from tests.support.deadlines import scaled
from tests.support.devclusters import Devcluster, devcluster
from tests.support.environments import CHECKOUT

GRACE_S = round(scaled(30))
"""Time that preempted jobs have to save; one that has saved ends at once."""
collect_ignore = [] if list_unpacked_versions(CHECKOUT) else ["test_releases.py"]
"""The last line of `make test` names what is missing."""


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    state_dir = tmp_path_factory.mktemp("cluster") / "state"
    with devcluster(state_dir, "--nodes=4", f"--grace-s={GRACE_S}") as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Devcluster) -> Iterator[Devcluster]:
    """Yield the shared cluster; afterwards undo the test's changes to it."""
    yield shared
    shared.restore()


@pytest.fixture
def cancelling(cluster: Devcluster) -> Iterator[Devcluster]:
    """The cluster, where preempted jobs are cancelled at once."""
    update = ("scontrol", "update", "PartitionName=scavenger")
    cluster.slurm(*update, "PreemptMode=CANCEL", "GraceTime=0")
    yield cluster
    cluster.slurm(*update, "PreemptMode=REQUEUE", f"GraceTime={GRACE_S}")
