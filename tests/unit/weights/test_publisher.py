from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.broadcast import choose_group_size, partition_replicas
from areal_hpc.weights.buckets import TensorSpec
from areal_hpc.weights.discovery import ReplicaKey
from areal_hpc.weights.publisher import Publisher
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.weight_updates import WITHOUT_MODEL, publishing

SPECS = [TensorSpec(f"norm.{at}.weight", (4,), "float32") for at in range(5)]


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    with publishing(tmp_path, cells=2) as publisher:
        yield publisher


def test_the_export_is_drained_even_when_nobody_listens(publisher: Publisher) -> None:
    exported: list[str] = []

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        for spec in SPECS:
            exported.append(spec.name)
            yield spec.name, torch.zeros(4)

    report = publisher.transport.update(WeightVersion(1, 0), SPECS, parameters(), [], WITHOUT_MODEL)
    assert exported == [spec.name for spec in SPECS]
    assert (report.ok, report.failed, report.parameter_bytes) == ((), {}, 80)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["norm.0.weight"], "ended before"),
        ([*(spec.name for spec in SPECS), "extra.weight", "more.weight"], "got extra"),
        (["extra.weight", "more.weight"], "got extra"),
    ],
)
def test_an_export_that_is_not_as_promised_is_drained_and_refused(
    publisher: Publisher, names: list[str], message: str
) -> None:
    arrivals = ((name, torch.zeros(4)) for name in names)
    with pytest.raises(WeightSyncError, match=message):
        publisher.transport.update(WeightVersion(1, 0), SPECS, arrivals, [], WITHOUT_MODEL)
    assert next(arrivals, None) is None


def test_a_replica_that_failed_is_updated_alone_so_that_it_fails_nobody_else() -> None:
    keys = [ReplicaKey(f"cell-{at}", 0, 1, 1, "", 0.0) for at in range(5)]
    groups = partition_replicas([*reversed(keys)], 2, {("cell-1", 0), ("cell-9", 0)})
    assert groups == [(keys[0], keys[2]), (keys[3], keys[4]), (keys[1],)]


@pytest.mark.parametrize(
    ("backend", "replicas", "size"),
    [("gloo", 32, 1), ("nccl", 1, 1), ("nccl", 4, 1), ("nccl", 5, 2), ("nccl", 32, 8)],
)
def test_gpus_form_few_groups_and_cpus_one_for_each_replica(
    backend: str, replicas: int, size: int
) -> None:
    assert choose_group_size(backend, replicas) == size
