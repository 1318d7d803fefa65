"""Which GPUs a process may use, by its environment and the device files."""

from pathlib import Path

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.jobs.node import (
    VISIBLE_DEVICES_VARIABLE,
    VisibleGpus,
    find_visible_gpus,
    read_numa_nodes,
    select_wanted_gpus,
)
from areal_hpc.jobs.task_processes import build_visible_gpus_variable
from areal_hpc.recipe.sections.cluster import WantedGpus
from areal_hpc.rundir.jobs import JobSpec, LaunchFile, ProcessSpec


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("3,5,7,9", ("3", "5", "7", "9")),
        (" 1, 0 ", ("1", "0")),
        ("GPU-8932f937,MIG-c1a2", ("GPU-8932f937", "MIG-c1a2")),
        ("0,-1,1", ("0",)),
        ("2,2,4", ("2", "4")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
    ],
)
def test_the_variable_beats_files(value: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    visible = find_visible_gpus({VISIBLE_DEVICES_VARIABLE: value}, tmp_path)
    assert visible.ids == expected
    assert visible.source == f"CUDA_VISIBLE_DEVICES={value!r}"


def test_without_the_variable_device_files_are_counted_and_numbered_from_0(tmp_path: Path) -> None:
    for name in ("nvidia4", "nvidia6", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert find_visible_gpus({}, tmp_path).ids == ("0", "1")
    assert find_visible_gpus({}, tmp_path / "none").ids == ()


def test_a_process_sees_its_tasks_gpus_if_it_uses_them_and_under_slurm_what_slurm_says() -> None:
    trainer = ProcessSpec("trainer", "train", "a:b", {}, uses_gpus=True)
    ledger = ProcessSpec("ledger", "train", "a:b", {})
    job = JobSpec("trainer", "train", [ledger, trainer], tasks=2)
    launch = LaunchFile(job, "jobs", "logs", "events", {}, gpus=[["3", "5"], ["7", "9"]])
    assert build_visible_gpus_variable(trainer, launch, 1) == {VISIBLE_DEVICES_VARIABLE: "7,9"}
    assert build_visible_gpus_variable(ledger, launch, 1) == {VISIBLE_DEVICES_VARIABLE: ""}
    by_slurm = LaunchFile(job, "jobs", "logs", "events", {})
    assert build_visible_gpus_variable(trainer, by_slurm, 1) == {}


def test_gpus_of_a_numa_node_stand_together_and_a_list_keeps_its_order() -> None:
    visible = VisibleGpus(("0", "1", "2", "3"), "here")
    nodes = {"0": 1, "1": 0, "2": 1, "3": 0}
    assert select_wanted_gpus(visible, "auto", nodes).ids == ("1", "3", "0", "2")
    assert select_wanted_gpus(visible, 3, nodes).ids == ("1", "3", "0")
    assert select_wanted_gpus(visible, (2, "1"), nodes).ids == ("2", "1")
    assert select_wanted_gpus(visible, "none", nodes).ids == ()
    assert select_wanted_gpus(visible, "auto", {}).ids == visible.ids


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (5, "cluster.gpus=5; this machine shows 4 GPUs"),
        ((1, 7, "GPU-a"), "cluster.gpus names GPUs 7, GPU-a; this machine shows 0, 1, 2, 3"),
    ],
)
def test_gpus_that_are_not_visible_are_refused(wanted: WantedGpus, said: str) -> None:
    with pytest.raises(RecipeError, match=r"at: cluster\.gpus") as refusal:
        select_wanted_gpus(VisibleGpus(("0", "1", "2", "3"), "here"), wanted, {})
    assert said in str(refusal.value)


def test_numa_nodes_are_those_of_the_pci_addresses(tmp_path: Path) -> None:
    dev, driver, pci = tmp_path / "dev", tmp_path / "driver", tmp_path / "pci"
    dev.mkdir()
    for number, (address, node) in enumerate([("0000:9A:00.0", "1"), ("0000:1b:00.0", "0")]):
        (dev / f"nvidia{number}").touch()
        (driver / address).mkdir(parents=True)
        (pci / address.lower()).mkdir(parents=True)
        (pci / address.lower() / "numa_node").write_text(node + "\n")
    assert read_numa_nodes(dev, driver, pci) == {"0": 0, "1": 1}
    (dev / "nvidia1").unlink()  # a container that shows one of them
    assert read_numa_nodes(dev, driver, pci) == {}
    assert read_numa_nodes(tmp_path, tmp_path / "none", pci) == {}
