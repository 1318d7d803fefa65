"""What stands in for CUDA where ranks train on the CPU leaves the rest of torch alone."""

import subprocess
import sys

PROBE = """
from areal_hpc.trainer.model.cpu.megatron_cpu import patch_torch_megatron_without_gpu
patch_torch_megatron_without_gpu()
import torch
with torch.device("meta"):
    made = torch.empty(2), torch.zeros(2), torch.tensor([1.0]), torch.ones(2)
print(*{str(one.device) for one in made}, torch.zeros(2, device="cuda").device)
"""


def test_tensors_are_made_on_the_default_device_after_it_as_before() -> None:
    """In a process of its own: what came before it in this one decides, too."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["meta", "cpu"]
