"""Model directories: written tensor by tensor, put in place whole, read by rows and columns."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import RecipeError
from areal_hpc.trainer.model.families.weight_map import HfTensorSpec
from areal_hpc.trainer.model.hf_weights import (
    HfModelReader,
    HfTensorSpecWithDtype,
    split_into_files,
    write_hf_model_dir,
)

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.arange(4, dtype=torch.bfloat16),
    "c": torch.arange(30, dtype=torch.float32).reshape(6, 5).t(),
}
SPECS: list[HfTensorSpecWithDtype] = [
    (name, tuple(one.shape), one.dtype) for name, one in TENSORS.items()
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "optimizer.bin").write_text("not part of a model")
    return folder


@pytest.mark.parametrize("file_bytes", [1, 60, 10_000])
def test_what_is_written_is_read_back(source: Path, tmp_path: Path, file_bytes: int) -> None:
    told: list[tuple[int, int]] = []
    target = tmp_path / "model"
    write_hf_model_dir(
        TENSORS.items(), SPECS, source, target,
        file_bytes=file_bytes, on_file=lambda *progress: told.append(progress),
    )  # fmt: skip
    files = sorted(target.glob("*.safetensors"))
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], TENSORS[name]) for name in TENSORS)
    assert len(files) == len(told) == len(split_into_files(SPECS, file_bytes))
    assert told[-1] == (48 + 8 + 120, 48 + 8 + 120)
    assert (target / "model.safetensors.index.json").exists() is (len(files) > 1)
    checkpoint = HfModelReader(target)
    for name, shape, _ in SPECS:
        assert torch.equal(checkpoint.read_tensor(HfTensorSpec(name, shape)), TENSORS[name])


def test_what_killed_writers_left_a_day_ago_is_deleted(source: Path, tmp_path: Path) -> None:
    models, a_day_ago = tmp_path / "export", time.time() - 90_000
    silent, alive = ".step_1.partial_1", ".step_1.partial_2"
    for name in (silent, alive, "step_3"):
        (models / name).mkdir(parents=True)
        (models / name / "model.safetensors").touch()
    os.utime(models / silent / "model.safetensors", (a_day_ago, a_day_ago))
    for name in (silent, alive):
        os.utime(models / name, (a_day_ago, a_day_ago))
    write_hf_model_dir(TENSORS.items(), SPECS, source, models / "step_4")
    assert {path.name for path in models.iterdir()} == {alive, "step_3", "step_4"}


def test_the_configuration_names_the_dtype_of_the_weights(source: Path, tmp_path: Path) -> None:
    write_hf_model_dir(TENSORS.items(), SPECS, source, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config == {"model_type": "qwen3", "dtype": "float32"}
    assert (tmp_path / "model" / "tokenizer.json").exists()
    assert not (tmp_path / "model" / "optimizer.bin").exists()


def test_a_stream_that_breaks_leaves_the_earlier_model(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    write_hf_model_dir(TENSORS.items(), SPECS, source, target)
    before = (target / "model.safetensors").read_bytes()

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", TENSORS["a"] + 1
        raise OSError("the storage is gone")

    with pytest.raises(OSError, match="gone"):
        write_hf_model_dir(broken(), SPECS, source, target)
    assert (target / "model.safetensors").read_bytes() == before


def test_part_of_a_tensor_is_read_and_its_shape_is_checked(source: Path, tmp_path: Path) -> None:
    write_hf_model_dir(TENSORS.items(), SPECS, source, tmp_path / "model", file_bytes=1)
    checkpoint = HfModelReader(tmp_path / "model")
    rows = checkpoint.read_tensor(HfTensorSpec("a", (3, 4)), (slice(1, 3),))
    columns = checkpoint.read_tensor(HfTensorSpec("c", (5, 6)), (slice(None), slice(3, 6)))
    assert torch.equal(rows, TENSORS["a"][1:3])
    assert torch.equal(columns, TENSORS["c"][:, 3:6])
    with pytest.raises(RecipeError, match=r"has shape \(3, 4\), config.json says \(4, 4\)"):
        checkpoint.read_tensor(HfTensorSpec("a", (4, 4)), (slice(0, 2),))
    with pytest.raises(RecipeError, match="no tensor d"):
        checkpoint.read_tensor(HfTensorSpec("d", (1,)))
