"""Which of the visible GPUs a trainer rank takes, on machines that are made up."""

import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import ClusterError
from areal_hpc.trainer.process_groups import _set_device


def show_gpus(monkeypatch: pytest.MonkeyPatch, visible: int) -> list[int]:
    """A machine that shows so many; the devices that are set there."""
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    return devices


@pytest.mark.parametrize(
    ("visible", "setting", "expected"),
    [
        (1, "auto", [0, 0, 0]),  # the only visible one belongs to any rank
        (1, "cuda", [0, 0, 0]),
        (8, "cuda", [0, 1, 2]),
    ],
)
def test_each_rank_takes_its_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: int, setting: str, expected: list[int]
) -> None:
    taken = show_gpus(monkeypatch, visible)
    found = [_set_device(setting, rank) for rank in range(3)]
    assert found == [torch.device("cuda", index) for index in expected]
    assert taken == expected


def test_too_few_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = show_gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ClusterError, match="--gpus-per-task=1") as refusal:
        _set_device("cuda", 3)
    said = str(refusal.value)
    assert "local rank 3 of the trainer needs a GPU of its own, and 2 are visible" in said
    assert "CUDA_VISIBLE_DEVICES='4,5'" in said
    assert "--gpu-bind" in said
    assert "at: cluster.slurm.srun" in said
    assert taken == []


def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = show_gpus(monkeypatch, 0)
    assert _set_device("auto", 0) == torch.device("cpu")
    with pytest.raises(ClusterError, match="shows no GPU"):
        _set_device("cuda", 0)
    assert taken == []
