"""An update of all replicas, its buckets, and weights that travel by the disk."""

import dataclasses
import errno
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from areal_hpc.errors import WeightSyncError
from areal_hpc.recipe.sections.inference import WeightsConfig
from areal_hpc.weights.broadcast import choose_group_size, partition_replicas
from areal_hpc.weights.buckets import (
    BYTES_BY_DTYPE,
    BucketPlan,
    OpenBucket,
    PackingBuffers,
    TensorSpec,
    plan_buckets,
)
from areal_hpc.weights.disk import WeightsFolder
from areal_hpc.weights.publisher import (
    MAX_URGENT_RETRY_PAUSE_S,
    Publisher,
    UpdateBackoff,
    WeightSenders,
    choose_sender_ranks,
)
from areal_hpc.weights.replicas import ReplicaKey
from areal_hpc.weights.update import (
    PROBE_TOKENS,
    Probe,
    check_probe,
    choose_probe_ids,
    get_max_probe_gap,
)
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.full_disk import full_disk
from tests.support.weight_updates import WITHOUT_MODEL, publishing, specs_of

SPECS = [TensorSpec(f"norm.{index}.weight", (4,), "float32") for index in range(5)]


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
    assert (report.ok, report.failed) == ((), {})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["norm.0.weight"], "ended before"),
        ([*(spec.name for spec in SPECS), "extra.weight", "more.weight"], "got extra"),
        (["extra.weight", "more.weight"], "got extra"),
    ],
)
def test_a_broken_export_is_refused(publisher: Publisher, names: list[str], message: str) -> None:
    arrivals = ((name, torch.zeros(4)) for name in names)
    with pytest.raises(WeightSyncError, match=message):
        publisher.transport.update(WeightVersion(1, 0), SPECS, arrivals, [], WITHOUT_MODEL)
    assert next(arrivals, None) is None


def test_a_replica_that_failed_is_updated_alone_so_that_it_fails_nobody_else() -> None:
    keys = [ReplicaKey(f"cell-{index}", 0, 1, 1, "", 0.0) for index in range(5)]
    groups = partition_replicas([*reversed(keys)], 2, {("cell-1", 0), ("cell-9", 0)})
    assert groups == [(keys[0], keys[2]), (keys[3], keys[4]), (keys[1],)]


@pytest.mark.parametrize(
    ("backend", "replicas", "size"),
    [("gloo", 32, 1), ("nccl", 1, 1), ("nccl", 4, 1), ("nccl", 5, 2), ("nccl", 32, 8)],
)
def test_gpus_form_few_groups_and_cpus_many(backend: str, replicas: int, size: int) -> None:
    assert choose_group_size(backend, replicas) == size


def replicas(count: int, incarnation: int = 0) -> list[ReplicaKey]:
    return [ReplicaKey("cell-0", index, incarnation, 1, "", 0.0) for index in range(count)]


@pytest.mark.parametrize(
    ("nodes", "senders", "expected"),
    [
        ([0], None, [0]),
        ([0, 0, 0, 0], None, [0]),
        ([0, 0, 1, 1], None, [0, 2]),
        ([0, 1, 0, 1], None, [0, 1]),
        ([0, 0, 1, 1], 1, [0]),
        ([0, 0, 1, 1], 3, [0, 2, 1]),
        ([0, 0], 2, [0, 1]),
    ],
)
def test_senders_are_spread(nodes: Sequence[int], senders: int | None, expected: list[int]) -> None:
    assert choose_sender_ranks(nodes, WeightsConfig(senders=senders)) == expected


def test_replicas_are_divided_evenly_and_stay_with_their_sender() -> None:
    assigner = WeightSenders(0, 2, SPECS, None, lambda *arguments: [])
    first = assigner.assign(replicas(5))
    assert [len(share) for share in first] == [3, 2]
    restarted = replicas(5, incarnation=1)
    for key in restarted:
        shares = assigner.assign([key])
        sender = next(index for index, share in enumerate(shares) if share)
        assert key.cell_and_index in [replica.cell_and_index for replica in first[sender]]
    late = ReplicaKey("cell-1", 0, 0, 1, "", 0.0)
    assert assigner.assign([late]) == [[], [late]], "the sender with fewer gets the new one"


GOOD = ReplicaKey("cell-0", 0, 1, 1, "http://relay", 0.0)
BAD = dataclasses.replace(GOOD, index=1)


def failed(times: int, *, cost_s: float) -> tuple[UpdateBackoff, float]:
    """Return a back-off that saw BAD fail so often, and the time of the last failure."""
    backoff, now = UpdateBackoff(), 0.0
    for _ in range(times):
        now += 10_000
        backoff.record_update([GOOD], [BAD], now, cost_s)
    return backoff, now


def test_later_tries_take_a_shrinking_share_of_the_time() -> None:
    for times, pause_s in ((2, 20.0), (3, 40.0), (4, 80.0)):
        backoff, now = failed(times, cost_s=10)
        assert backoff.filter_retryable([BAD], now + pause_s - 0.1) == []
        assert backoff.filter_retryable([BAD], now + pause_s) == [BAD]


def test_a_success_forgives_all() -> None:
    backoff, now = failed(5, cost_s=300)
    backoff.record_update([BAD], [], now, 0.1)
    assert backoff.filter_retryable([BAD], now) == [BAD]


def test_nobody_waits_long_while_no_replica_has_the_weights() -> None:
    backoff, now = failed(9, cost_s=300)
    later = now + MAX_URGENT_RETRY_PAUSE_S
    assert backoff.filter_retryable([BAD], later) == []
    assert backoff.filter_retryable([BAD], later, is_urgent=True) == [BAD]


PROBE = Probe([5, 6, 7], [-1.0, -2.0])


@pytest.mark.parametrize("vocab", [8, 300, 151_936])
def test_the_prompt_is_the_same_each_time_and_inside_the_vocabulary(vocab: int) -> None:
    ids = choose_probe_ids(vocab)
    assert ids == choose_probe_ids(vocab)
    assert len(ids) == PROBE_TOKENS
    assert all(0 <= token < vocab for token in ids)


def test_a_replica_with_a_short_context_is_judged_by_what_it_scored() -> None:
    check_probe(PROBE, [-1.0001], 1e-3, "replica 0")
    with pytest.raises(WeightSyncError, match="got none"):
        check_probe(PROBE, [], 1e-3, "replica 0")


@pytest.mark.parametrize("wrong", [-2.1, math.nan, -math.inf])
def test_what_differs_on_average_or_is_no_number_is_refused(wrong: float) -> None:
    with pytest.raises(WeightSyncError, match="differ from the trainer"):
        check_probe(PROBE, [-1.0, wrong], 0.01, "replica 0")


def test_the_bound_is_that_of_the_type_that_rounds_most() -> None:
    specs = [TensorSpec("bias", (4,), "float32"), TensorSpec("weight", (4,), "bfloat16")]
    assert get_max_probe_gap(WeightsConfig(), specs[:1]) == 1e-3
    assert get_max_probe_gap(WeightsConfig(), specs) == 0.25
    assert get_max_probe_gap(WeightsConfig(max_probe_gap=0.5), specs) == 0.5


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
def test_a_full_disk_leaves_replicas_alone(tmp_path: Path, folder: str, number: int) -> None:
    """A try that left a part of the model behind would keep the disk full."""
    weights = {f"norm.{i}.weight": torch.zeros(size) for i, size in enumerate((1024, 1024, 4096))}
    keys = [ReplicaKey(f"cell-{index}", 0, 1, 1, "http://127.0.0.1:9", 0.0) for index in range(2)]
    drained = iter(weights.items())
    with (
        publishing(
            tmp_path, cells=2, weights_dir=tmp_path / folder, transport="disk", bucket_bytes=4096
        ) as publisher,
        full_disk(8192),
    ):
        report = publisher.transport.update(
            WeightVersion(1, 0), specs_of(weights), drained, keys, WITHOUT_MODEL
        )
    assert next(drained, None) is None
    assert [*report.failed] == keys
    for error in report.failed.values():
        assert os.strerror(number) in error
        assert "make room" in error
    assert [*tmp_path.glob("weights/*")] == []


NAMES = [f"model.layers.{layer}.weight" for layer in range(30)]
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(BYTES_BY_DTYPE))


@st.composite
def spec_lists(draw: st.DrawFn) -> list[TensorSpec]:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    return [TensorSpec(name, draw(shapes), draw(dtypes)) for name in names]


@given(specs=spec_lists(), bucket_bytes=st.integers(1, 100_000))
def test_parameters_are_sent_once_and_aligned(specs: list[TensorSpec], bucket_bytes: int) -> None:
    buckets = plan_buckets(specs, bucket_bytes)
    sent = [spec for bucket in buckets for spec in bucket.specs]
    assert sorted(sent, key=str) == sorted(specs, key=str)
    for bucket in buckets:
        end = 0
        for spec in bucket.specs:
            assert end % BYTES_BY_DTYPE[spec.dtype] == 0, "the receiver knows no gaps"
            end += spec.size_bytes
        assert bucket.size_bytes == end


@given(specs=spec_lists(), bucket_bytes=st.integers(1, 100_000))
def test_buckets_keep_order_and_their_limit(specs: list[TensorSpec], bucket_bytes: int) -> None:
    buckets = plan_buckets(specs, bucket_bytes)
    bucket_of = {spec.name: index for index, bucket in enumerate(buckets) for spec in bucket.specs}
    arrival = [bucket_of[spec.name] for spec in specs]
    assert arrival == sorted(arrival), "a bucket is complete before the next one begins"
    for bucket in buckets:
        assert bucket.size_bytes <= bucket_bytes or len(bucket.specs) == 1


CPU = torch.device("cpu")
TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "b.weight": torch.arange(4, dtype=torch.float32),
    "c.weight": torch.arange(3, dtype=torch.uint8),
    "d.weight": torch.tensor(2.5),
}


def only_bucket() -> BucketPlan:
    (bucket,) = plan_buckets(specs_of(TENSORS), 1 << 20)
    return bucket


def test_the_last_bucket_stays_whole_while_the_next_is_packed() -> None:
    bucket, buffers = only_bucket(), PackingBuffers(CPU)
    held = [
        buffers.open_bucket_in_older_buffer(bucket).tensors_to_send[0].fill_(number)
        for number in (1, 2, 3)
    ]
    assert held[0].data_ptr() == held[2].data_ptr(), "two buffers, used in turn"
    assert held[1].unique().tolist() == [2]


def test_in_place_every_parameter_is_a_message_in_the_order_named() -> None:
    full = OpenBucket(only_bucket())
    for name, tensor in reversed(TENSORS.items()):
        full.place_parameter(name, tensor)
    assert full.is_full
    for spec, message in zip(full.bucket.specs, full.tensors_to_send, strict=True):
        assert message.data_ptr() == TENSORS[spec.name].data_ptr(), "without a copy"
        assert full.tensors[spec.name] is message


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("b.weight", torch.zeros(5), r"float32 of shape \(4,\), got float32 of shape \(5,\)"),
        ("b.weight", torch.zeros(4, dtype=torch.float64), "got float64"),
        ("z.weight", torch.zeros(4), "got z.weight"),
    ],
)
def test_a_false_parameter_is_refused(name: str, tensor: torch.Tensor, message: str) -> None:
    packed = PackingBuffers(CPU).open_bucket_in_older_buffer(only_bucket())
    with pytest.raises(WeightSyncError, match=message):
        packed.place_parameter(name, tensor)
