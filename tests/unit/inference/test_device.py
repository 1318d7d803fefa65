"""Whether a replica computes on the GPU."""

from pathlib import Path

import pytest

from areal_hpc.inference.config import resolve_device
from areal_hpc.recipe.sections.inference import InferenceConfig


@pytest.mark.parametrize(
    ("files", "environ", "expected"),
    [
        (["nvidia0"], {}, "cuda"),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": "0"}, "cuda"),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "cpu"),
        (["nvidiactl"], {}, "cpu"),
        ([], {"CUDA_VISIBLE_DEVICES": "0"}, "cpu"),
    ],
)
def test_auto_is_the_gpu_where_one_is_there_and_not_hidden(
    files: list[str], environ: dict[str, str], expected: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert resolve_device(InferenceConfig(device="auto"), environ, tmp_path) == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_device_that_is_named_is_taken(device: str, tmp_path: Path) -> None:
    config = InferenceConfig.model_validate({"device": device})
    assert resolve_device(config, {"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == device
