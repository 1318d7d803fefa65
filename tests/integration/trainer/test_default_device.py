"""What stands in for CUDA where ranks train on the CPU leaves the rest of torch alone."""

import pytest
import torch

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.model.cpu.megatron_cpu import patch_torch_megatron_without_gpu
from tests.support.replay_worker import Scenario


@pytest.mark.on_ranks(1)
def test_tensors_are_made_on_the_default_device_after_it_as_before(
    scenario: Scenario, paths: RunPaths
) -> None:
    patch_torch_megatron_without_gpu()
    with torch.device("meta"):
        made = torch.empty(2), torch.zeros(2), torch.tensor([1.0]), torch.ones(2)
    assert {str(one.device) for one in made} == {"meta"}
    assert str(torch.zeros(2, device="cuda").device) == "cpu"
