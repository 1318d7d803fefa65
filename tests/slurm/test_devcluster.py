"""Slurm of the devcluster: nodes, GPUs, preemption, lost nodes, and no trace of it afterwards."""

import subprocess
from pathlib import Path

import pytest

from tests.support.deadlines import scaled
from tests.support.devclusters import Devcluster, devcluster
from tests.support.thoroughness import choose
from tests.support.waiting import wait_for

NODES = ["n01", "n02", "n03", "n04"]


def test_every_node_is_a_machine_of_its_own(cluster: Devcluster) -> None:
    command = (
        "touch /dev/shm/$(hostname); sleep 1; echo $(hostname) $(hostname -i) "
        "$(ip -o link | wc -l) $(pgrep -c slurmctld) $(cd /dev/shm; echo n0*)"
    )
    lines = cluster.slurm("srun", "-N4", "bash", "-c", command).splitlines()
    names, addresses, links, controllers, shared_memory = zip(
        *(line.split() for line in sorted(lines)), strict=True
    )
    assert list(names) == list(shared_memory) == NODES
    assert len(set(addresses)) == 4
    assert set(links) == {"2"}, "loopback and one cable"
    assert set(controllers) == {"0"}, "it runs on this machine, not on theirs"


@pytest.mark.parametrize("options", choose([(), ("--loopback",)], ("--loopback",)))
def test_a_second_cluster_without_accounting_leaves_nothing(
    cluster: Devcluster, tmp_path: Path, options: tuple[str, ...]
) -> None:
    with devcluster(tmp_path / "state", "--nodes=2", "--no-accounting", *options) as second:
        words = second.done("env").splitlines()
        assert words[0] == f"export SLURM_CONF={second.state_dir}/etc/slurm.conf"
        names = second.slurm("srun", "-N2", "sh", "-c", "echo $SLURMD_NODENAME").splitlines()
        assert sorted(names) == ["n01", "n02"]
        with pytest.raises(AssertionError, match="accounting storage is disabled"):
            second.slurm("sacct")
        job = second.submit("trap '' TERM; srun sleep 600 & wait", "-N2")
        second.await_state(job, "RUNNING")
        waiting = subprocess.Popen(("srun", "sleep", "600"), env=second.environ)
        wait_for(lambda: len(second.slurm("squeue", "-h").splitlines()) == 2)
        second.done("kill-node", "n02")
        second.down()
        waiting.wait(scaled(60))
        assert second.done("down").startswith("there is no devcluster")
    assert cluster.slurm("srun", "-N4", "hostname")
    assert cluster.links_and_groups()


def test_a_daemon_that_cannot_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with devcluster(state_dir, "--nodes=1", "--no-accounting", "--loopback") as broken:
        broken.done("kill-node", "n01")
        (state_dir / "etc" / "gres.conf").write_text("Name=gpu File=/no/such/device\n")
        refused = broken.command("restore-node", "n01", "--timeout-s=3")
        assert refused.returncode == 75
        assert refused.stderr.startswith("error: n01 ")
        assert "/no/such/device" in refused.stderr
