import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from areal_hpc.errors import WeightSyncError
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.buckets.bucket import OpenBucket, PackingBuffers
from areal_hpc.weights.buckets.plan import TensorSpec, plan_buckets
from areal_hpc.weights.publisher import Publisher
from areal_hpc.weights.report import ReplicaKey
from areal_hpc.weights.transports.disk import WeightsFolder
from areal_hpc.wire.weight_version import WeightVersion

CPU = torch.device("cpu")
DTYPES = ["float64", "float32", "bfloat16", "float16", "uint8"]


def filled(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(getattr(torch, dtype))


def packed_in(specs: list[TensorSpec]) -> Iterator[OpenBucket]:
    for bucket in plan_buckets(specs, 512):
        packed = PackingBuffers(CPU).open(bucket)
        for slot in bucket.slots:
            at = specs.index(slot.spec)
            packed.place(slot.spec.name, filled(slot.spec.shape, slot.spec.dtype, at))
        yield packed


@given(
    held=st.lists(
        st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=8,
    )
)
def test_what_safetensors_reads_is_what_was_packed(
    held: list[tuple[list[int], str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("weights")
    specs = [
        TensorSpec(f"norm.{at}.weight", tuple(shape), dtype)
        for at, (shape, dtype) in enumerate(held)
    ]
    folder = WeightsFolder(root, WeightVersion(1, 2), 0)
    for packed in packed_in(specs):
        folder.write(packed)
    assert [path.name for path in root.iterdir()] == [".1.2.0.partial"], "not there until complete"
    folder.put_in_place()
    read: dict[str, torch.Tensor] = {}
    for path in (root / folder.name).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            read |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert read.keys() == {spec.name for spec in specs}
    for at, spec in enumerate(specs):
        assert str(read[spec.name].dtype) == f"torch.{spec.dtype}"
        assert torch.equal(read[spec.name], filled(spec.shape, spec.dtype, at))


def test_older_folders_are_deleted_and_those_of_a_successor_are_not(tmp_path: Path) -> None:
    for serial in range(2):
        WeightsFolder(tmp_path, WeightVersion(1, 7), serial).put_in_place()
    folder = WeightsFolder(tmp_path, WeightVersion(1, 7), 2)
    folder.put_in_place()
    (tmp_path / ".1.6.0.partial").mkdir()  # of a trainer that was killed
    for name in ("2.7.0", ".2.8.0.partial", "notes"):
        (tmp_path / name).mkdir()
    folder.delete_older()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"1.7.2", "2.7.0", ".2.8.0.partial", "notes"}


def test_a_full_disk_leaves_replicas_alone_and_is_said_of_each(tmp_path: Path) -> None:
    specs = [TensorSpec("norm.weight", (4,), "float32")]
    keys = [ReplicaKey(f"cell-{at}", 0, 1, 1, "http://127.0.0.1:9", 0.0) for at in range(2)]
    config = WeightsConfig(transport="disk", update_timeout_s=5)
    publisher = Publisher(config, tmp_path, 2, "key", "gloo", CPU, Path("/dev/full/weights"))
    drained = iter([("norm.weight", torch.zeros(4))])
    report = publisher.publish(WeightVersion(1, 0), specs, drained, keys)
    publisher.close()
    assert next(drained, None) is None
    assert [*report.failed] == keys
    for error in report.failed.values():
        assert isinstance(error, WeightSyncError)
        assert os.strerror(errno.ENOTDIR) in str(error)
        assert "make room" in str(error)


def test_what_a_full_disk_took_is_given_back(tmp_path: Path) -> None:
    """Else every try would leave a part of the model behind, and the disk would stay full."""
    specs = [TensorSpec(f"norm.{at}.weight", (1024,), "float32") for at in (1, 4, 5)]
    specs[2] = TensorSpec("norm.5.weight", (4096,), "float32")
    config = WeightsConfig(transport="disk", update_timeout_s=5, bucket_bytes=4096)
    key = ReplicaKey("cell-0", 0, 1, 1, "http://127.0.0.1:9", 0.0)
    publisher = Publisher(config, tmp_path, 1, "key", "gloo", CPU, tmp_path / "weights")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        parameters = ((spec.name, torch.zeros(spec.shape)) for spec in specs)
        report = publisher.publish(WeightVersion(1, 0), specs, parameters, [key])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    publisher.close()
    assert os.strerror(errno.EFBIG) in str(report.failed[key])
    assert list((tmp_path / "weights").iterdir()) == []
