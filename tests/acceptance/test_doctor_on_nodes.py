"""`doctor --gpu --nodes 2` on a devcluster, over gloo: a job examines nodes and reports."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import areal_hpc
from tests.support.devclusters import Devcluster, devcluster

TIMEOUT_S = 900.0
NODES = 2


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Devcluster]:
    with devcluster(tmp_path / "state", f"--nodes={NODES}") as found:
        yield found


@pytest.mark.timeout(1200)
def test_two_nodes_are_examined_by_a_job_that_leaves_nothing(
    cluster: Devcluster, tmp_path: Path
) -> None:
    site, evidence = tmp_path / "site.yaml", tmp_path / "doctor.json"
    site.write_text(f"fileroot: {tmp_path}/runs\nslurm: {{partition: scavenger}}\n")
    words = ("doctor", "--site", site, "--gpu", "--device", "cpu", "--nodes", NODES)
    ended = areal_hpc(*words, "--json", evidence, environ=cluster.environ, timeout_s=TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, second = json.loads(evidence.read_text())["gpu_nodes"]
    assert [node["facts"]["host"] for node in (first, second)] == ["n01", "n02"]
    between = first["network_rates"]
    assert (between["ranks"], between["wrong_elements"]) == (2 * NODES, 0), between
    rates = first["node_rates"]
    assert (rates["ranks"], rates["backend"], rates["wrong_elements"]) == (2, "gloo", 0)
    said = " ".join(ended.stdout.split())
    for node in ("n01", "n02"):
        assert f"ok isolation {node}: programs of the model run in namespaces" in said
    assert "ok    2 nodes" in ended.stdout
    assert "ok    tiny run" in ended.stdout
    assert list((tmp_path / "runs").iterdir()) == []
    assert cluster.slurm("squeue", "--noheader") == ""
