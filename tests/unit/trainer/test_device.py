"""Which of the visible GPUs a trainer rank takes, on machines that are made up."""

import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import ClusterError
from areal_hpc.trainer.process_groups import _choose_and_set_device


@pytest.fixture
def taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices that are set, on a machine that shows `request.param` GPUs."""
    visible: int = request.param
    devices: list[int] = []

    def set_device(index: int) -> None:
        if index >= visible:
            raise RuntimeError("CUDA error: invalid device ordinal")
        devices.append(index)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    return devices


@pytest.mark.parametrize("taken", [1], indirect=True)
@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_the_only_visible_gpu_belongs_to_any_rank(taken: list[int], wanted: str) -> None:
    assert [_choose_and_set_device(wanted, rank) for rank in range(4)] == [
        torch.device("cuda", 0)
    ] * 4
    assert taken == [0, 0, 0, 0]


@pytest.mark.parametrize("taken", [8], indirect=True)
def test_with_all_gpus_of_the_node_visible_each_rank_takes_its_own(taken: list[int]) -> None:
    assert [_choose_and_set_device("cuda", rank).index for rank in range(8)] == list(range(8))
    assert taken == list(range(8))


@pytest.mark.parametrize("taken", [2], indirect=True)
def test_too_few_gpus_are_counted(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert _choose_and_set_device("cuda", 1).index == 1
    with pytest.raises(ClusterError, match="--gpus-per-task=1") as refusal:
        _choose_and_set_device("cuda", 3)
    said = str(refusal.value)
    assert "local rank 3 of the trainer needs a GPU of its own, and 2 are visible" in said
    assert "CUDA_VISIBLE_DEVICES='4,5'" in said
    assert "--gpu-bind" in said
    assert "at: cluster.slurm.srun" in said
    assert taken == [1]


@pytest.mark.parametrize("taken", [0], indirect=True)
def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error(taken: list[int]) -> None:
    assert _choose_and_set_device("auto", 0) == torch.device("cpu")
    with pytest.raises(ClusterError, match="shows no GPU"):
        _choose_and_set_device("cuda", 0)
    assert taken == []
