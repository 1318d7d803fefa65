"""Files of tensors: written in parts or from memory, put in place whole, damage noticed."""

import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import RecipeError, ShardError
from areal_hpc.rundir.checkpoints import DIGEST_BLOCK_BYTES, DIGEST_BYTES
from areal_hpc.trainer.checkpoints.store import write_rank_file
from areal_hpc.trainer.checkpoints.stored_tensors import (
    Box,
    RankFileReader,
    intersect_boxes,
    split_flat_range,
)
from areal_hpc.trainer.model.families.weight_map import HfTensorSpec
from areal_hpc.trainer.model.hf_weights import (
    HfModelReader,
    HfTensorSpecWithDtype,
    split_into_files,
    write_hf_model_dir,
)
from tests.support.counted_reads import counted_reads

SIZE = 3 * DIGEST_BLOCK_BYTES + 1234
CONTENT = random.Random(3).randbytes(SIZE)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rank_00000.bin"
    write_rank_file(memoryview(CONTENT), path)
    return path


def test_any_part_can_be_read(file: Path) -> None:
    chance = random.Random(4)
    edges = [
        0,
        1,
        DIGEST_BLOCK_BYTES - 1,
        DIGEST_BLOCK_BYTES,
        DIGEST_BLOCK_BYTES + 1,
        3 * DIGEST_BLOCK_BYTES,
        SIZE - 1,
        SIZE,
    ]
    with closing(RankFileReader(file, SIZE)) as reader:
        for _ in range(200):
            start, stop = sorted(chance.sample([*edges, *chance.sample(range(SIZE), 8)], 2))
            assert reader.read(start, stop - start) == CONTENT[start:stop]


def test_what_is_read_in_order_is_read_once(file: Path) -> None:
    with counted_reads() as sizes, closing(RankFileReader(file, SIZE)) as reader:
        step = DIGEST_BLOCK_BYTES // 3 + 7
        parts = [reader.read(offset, min(step, SIZE - offset)) for offset in range(0, SIZE, step)]
    assert b"".join(parts) == CONTENT
    assert sum(sizes) == file.stat().st_size


@pytest.mark.parametrize(
    "offset", [0, DIGEST_BLOCK_BYTES, SIZE - 1, SIZE, SIZE + 4 * DIGEST_BYTES - 1]
)
def test_a_bit_that_flipped_is_noticed_where_it_is_read(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)
    with closing(RankFileReader(file, SIZE)) as reader:
        with pytest.raises(ShardError, match="crc32"):
            reader.read(0, SIZE)
        # Only one case changes the second block, of which this reads a part.
        if offset != DIGEST_BLOCK_BYTES:
            assert (
                reader.read(DIGEST_BLOCK_BYTES, 10)
                == CONTENT[DIGEST_BLOCK_BYTES : DIGEST_BLOCK_BYTES + 10]
            )


@pytest.mark.parametrize("size", [SIZE, SIZE // 2, 0, SIZE + 100])
def test_a_file_of_another_size_is_refused(file: Path, size: int) -> None:
    os.truncate(file, size)
    with pytest.raises(ShardError, match=f"has {size} bytes"):
        RankFileReader(file, SIZE)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (1, 6), (6, 1), (2, 3, 4)])
def test_the_blocks_of_every_range_have_its_numbers_in_order(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(tensor.numel() + 1), 2):
        boxes = split_flat_range(shape, start, stop)
        numbers = [number for box in boxes for number in tensor[box.slices].flatten().tolist()]
        assert numbers == list(range(start, stop))
        assert sum(box.numel for box in boxes) == stop - start
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_blocks_intersect_where_slices_do() -> None:
    marks = torch.zeros(4, 5, dtype=torch.int)
    edges = [
        Box((row, column), (rows, columns))
        for row, column in itertools.product(range(4), range(5))
        for rows, columns in itertools.product(range(1, 5 - row), range(1, 6 - column))
    ]
    for left, right in itertools.product(edges[::3], edges[::5]):
        marks.zero_()
        marks[left.slices] += 1
        marks[right.slices] += 1
        common = intersect_boxes(left, right)
        if common is None:
            assert marks.max() < 2
            continue
        assert (marks[common.slices] == 2).all()
        assert int((marks == 2).sum()) == common.numel
        within = common.shift_to_coordinates_within(left)
        assert torch.equal(marks[left.slices][within.slices], marks[common.slices])
        assert within.shift_from_within_to_whole(left) == common


TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.arange(4, dtype=torch.bfloat16),
    "c": torch.arange(30, dtype=torch.float32).reshape(6, 5).t(),
}
SPECS: list[HfTensorSpecWithDtype] = [
    (name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()
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
    reports: list[tuple[int, int]] = []
    target = tmp_path / "model"
    write_hf_model_dir(
        TENSORS.items(), SPECS, source, target,
        file_bytes=file_bytes, on_file=lambda *progress: reports.append(progress),
    )  # fmt: skip
    files = sorted(target.glob("*.safetensors"))
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], TENSORS[name]) for name in TENSORS)
    assert len(files) == len(reports) == len(split_into_files(SPECS, file_bytes))
    assert reports[-1] == (48 + 8 + 120, 48 + 8 + 120)
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
