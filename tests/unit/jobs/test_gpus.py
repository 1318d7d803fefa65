"""Which GPUs a process may use, by its environment and the device files."""

from pathlib import Path

import pytest

from areal_hpc.jobs.gpus import VISIBLE_DEVICES_VARIABLE, find_visible_gpus
from areal_hpc.jobs.task_processes import build_visible_gpus_variable
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
