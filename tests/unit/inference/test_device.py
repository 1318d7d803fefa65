"""Whether a replica computes on the GPU."""

from pathlib import Path

import pytest

from areal_hpc.inference.config import resolve_device
from areal_hpc.recipe.sections.trainer import Device


@pytest.mark.parametrize(
    ("device", "files", "environ", "expected"),
    [
        ("auto", ["nvidia0"], {}, "cuda"),
        ("auto", ["nvidia0"], {"CUDA_VISIBLE_DEVICES": "0"}, "cuda"),
        ("auto", ["nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        ("auto", ["nvidia0"], {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "cpu"),
        ("auto", ["nvidiactl"], {}, "cpu"),
        ("auto", [], {"CUDA_VISIBLE_DEVICES": "0"}, "cpu"),
        ("cpu", ["nvidia0"], {}, "cpu"),
        ("cuda", [], {"CUDA_VISIBLE_DEVICES": ""}, "cuda"),
    ],
)
def test_a_device_that_is_named_is_taken_and_auto_is_the_gpu_where_one_is_there_and_not_hidden(
    device: Device, files: list[str], environ: dict[str, str], expected: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert resolve_device(device, environ, tmp_path) == expected
