import errno
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_hpc.weights.buckets import PackingBuffers, plan_buckets
from areal_hpc.weights.disk import WeightsFolder
from areal_hpc.weights.replicas import ReplicaKey
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.weight_updates import WITHOUT_MODEL, publishing, specs_of

WEIGHTS = {
    "norm.0.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "norm.1.weight": torch.arange(100, dtype=torch.float32),
    "norm.2.weight": torch.arange(3, dtype=torch.uint8),
    "norm.3.weight": torch.tensor(2.5, dtype=torch.float64),
    "norm.4.weight": torch.arange(64, dtype=torch.float16),
}


def test_what_safetensors_reads_is_what_was_packed(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path, WeightVersion(1, 2), 0)
    buckets = plan_buckets(specs_of(WEIGHTS), 256)
    buffers = PackingBuffers(torch.device("cpu"))
    for bucket in buckets:
        packed = buffers.open_bucket_in_older_buffer(bucket)
        for spec in bucket.specs:
            packed.place_parameter(spec.name, WEIGHTS[spec.name])
        folder.write_bucket(packed)
    assert [path.name for path in tmp_path.iterdir()] == [".1.2.0.partial"], "until it is complete"
    folder.rename_into_place()
    files = [load_file(path) for path in (tmp_path / folder.name).glob("*.safetensors")]
    assert len(files) == len(buckets) > 1
    read = {name: tensor for file in files for name, tensor in file.items()}
    assert read.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_older_folders_are_deleted_and_those_of_a_successor_are_not(tmp_path: Path) -> None:
    for serial in range(2):
        WeightsFolder(tmp_path, WeightVersion(1, 7), serial).rename_into_place()
    folder = WeightsFolder(tmp_path, WeightVersion(1, 7), 2)
    folder.rename_into_place()
    (tmp_path / ".1.6.0.partial").mkdir()  # of a trainer that was killed
    for name in ("2.7.0", ".2.8.0.partial", "notes"):
        (tmp_path / name).mkdir()
    folder.delete_older()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"1.7.2", "2.7.0", ".2.8.0.partial", "notes"}


@pytest.mark.parametrize(
    ("folder", "number"), [("/dev/full/weights", errno.ENOTDIR), ("weights", errno.EFBIG)]
)
def test_a_full_disk_leaves_replicas_alone_is_said_of_each_and_gets_back_what_it_gave(
    tmp_path: Path, folder: str, number: int
) -> None:
    """Else every try would leave a part of the model behind, and the disk would stay full."""
    weights = {f"norm.{at}.weight": torch.zeros(size) for at, size in enumerate((1024, 1024, 4096))}
    keys = [ReplicaKey(f"cell-{at}", 0, 1, 1, "http://127.0.0.1:9", 0.0) for at in range(2)]
    drained = iter(weights.items())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with publishing(
        tmp_path, cells=2, weights_dir=tmp_path / folder, transport="disk", bucket_bytes=4096
    ) as publisher:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        try:
            report = publisher.transport.update(
                WeightVersion(1, 0), specs_of(weights), drained, keys, WITHOUT_MODEL
            )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert next(drained, None) is None
    assert [*report.failed] == keys
    for error in report.failed.values():
        assert os.strerror(number) in error
        assert "make room" in error
    assert [*tmp_path.glob("weights/*")] == []
