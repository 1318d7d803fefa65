"""Which nodes a job that is started again must not get."""

import time
from pathlib import Path

from areal_hpc.jobs.requeue import build_exclude_list
from areal_hpc.rundir.jobs import (
    EXCLUDED_NODE_LIFETIME_S,
    ExcludedNode,
    SlurmLaunchInfo,
    add_excluded_node,
    list_unexpired_excluded_nodes,
)
from areal_hpc.rundir.jsonl import append_line


def test_a_failed_node_is_excluded_for_a_day_and_the_recipes_own_for_good(tmp_path: Path) -> None:
    path = tmp_path / "excluded_nodes.jsonl"
    slurm = SlurmLaunchInfo("", "", str(path), "trainer", "", "", excluded_by_recipe="n[01-02]")
    assert build_exclude_list(slurm, "n[01-02]") == "n[01-02]"
    long_ago = time.time() - EXCLUDED_NODE_LIFETIME_S - 1
    for node in ("n02", "n05"):
        append_line(path, ExcludedNode(node, "no GPU", long_ago))
    add_excluded_node(path, "n07", "no storage", "9")
    assert list_unexpired_excluded_nodes(path) == ["n07"]
    assert build_exclude_list(slurm, "n[01-02],n05,n09") == "n01,n02,n09,n07"
    add_excluded_node(path, "n05", "no GPU", "12")
    assert build_exclude_list(slurm, "n[01-02],n05") == "n[01-02],n05,n07", "it failed again"
