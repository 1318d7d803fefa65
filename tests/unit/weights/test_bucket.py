import pytest
import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.buckets import BucketPlan, OpenBucket, PackingBuffers, plan_buckets
from tests.support.weight_updates import specs_of

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
        packed.copy_or_hold_parameter(name, TENSORS[name])
    assert packed.is_full
    named = [TENSORS[slot.spec.name].reshape(-1).view(torch.uint8) for slot in bucket.slots]
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
        full.copy_or_hold_parameter(name, tensor)
    assert full.is_full
    for slot, message in zip(full.bucket.slots, full.tensors_to_send, strict=True):
        assert message.data_ptr() == TENSORS[slot.spec.name].data_ptr(), "without a copy"
        assert full.tensors[slot.spec.name] is message


def test_in_place_a_parameter_that_is_scattered_in_memory_is_copied() -> None:
    (bucket,) = plan_buckets(specs_of({"w": torch.zeros(3, 2)}), 1)
    full = OpenBucket(bucket)
    scattered = torch.arange(6.0).reshape(2, 3).T
    full.copy_or_hold_parameter("w", scattered)
    (message,) = full.tensors_to_send
    assert message.is_contiguous()
    assert torch.equal(message, scattered)


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
        packed.copy_or_hold_parameter(name, tensor)
