import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.buckets import (
    BYTES_BY_DTYPE,
    BucketPlan,
    OpenBucket,
    PackingBuffers,
    TensorSpec,
    plan_buckets,
)
from tests.support.weight_updates import specs_of

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
    bucket_of = {spec.name: at for at, bucket in enumerate(buckets) for spec in bucket.specs}
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


def test_the_bytes_are_the_tensors_end_to_end_in_the_order_named() -> None:
    bucket = only_bucket()
    packed = PackingBuffers(CPU).open_bucket_in_older_buffer(bucket)
    for name in reversed(TENSORS):  # in any order of arrival
        assert not packed.is_full
        packed.place_parameter(name, TENSORS[name])
    assert packed.is_full
    named = [TENSORS[spec.name].reshape(-1).view(torch.uint8) for spec in bucket.specs]
    assert torch.equal(packed.tensors_to_send[0], torch.cat(named))
    for name, tensor in packed.tensors.items():
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor, TENSORS[name])


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
