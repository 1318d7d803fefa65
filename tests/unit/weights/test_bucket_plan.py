import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.weights.buckets import (
    BYTES_BY_DTYPE,
    CPU_BUCKET_BYTES,
    GPU_BUCKET_BYTES,
    BucketPlan,
    TensorSpec,
    get_bucket_bytes,
    plan_buckets,
)

NAMES = [f"model.layers.{layer}.weight" for layer in range(30)]
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(BYTES_BY_DTYPE))


@st.composite
def spec_lists(draw: st.DrawFn) -> list[TensorSpec]:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    return [TensorSpec(name, draw(shapes), draw(dtypes)) for name in names]


def specs_in(bucket: BucketPlan) -> list[TensorSpec]:
    return [slot.spec for slot in bucket.slots]


@given(specs=spec_lists(), bucket_bytes=st.integers(1, 100_000))
def test_parameters_are_sent_once_and_aligned(specs: list[TensorSpec], bucket_bytes: int) -> None:
    buckets = plan_buckets(specs, bucket_bytes)
    sent = [spec for bucket in buckets for spec in specs_in(bucket)]
    assert sorted(sent, key=str) == sorted(specs, key=str)
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset_bytes == end, "the receiver knows no gaps"
            assert slot.offset_bytes % BYTES_BY_DTYPE[slot.spec.dtype] == 0
            end += slot.spec.size_bytes
        assert bucket.size_bytes == end


@given(specs=spec_lists(), bucket_bytes=st.integers(1, 100_000))
def test_buckets_keep_order_and_their_limit(specs: list[TensorSpec], bucket_bytes: int) -> None:
    buckets = plan_buckets(specs, bucket_bytes)
    bucket_of = {spec.name: at for at, bucket in enumerate(buckets) for spec in specs_in(bucket)}
    arrival = [bucket_of[spec.name] for spec in specs]
    assert arrival == sorted(arrival), "a bucket is complete before the next one begins"
    for bucket in buckets:
        assert bucket.size_bytes <= bucket_bytes or len(bucket.slots) == 1


def test_small_parameters_share_a_bucket_up_to_its_limit() -> None:
    specs = [TensorSpec(f"norm.{at}.weight", (256,), "float32") for at in range(5)]
    assert [len(bucket.slots) for bucket in plan_buckets(specs, 2048)] == [2, 2, 1]


def test_a_name_that_comes_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        plan_buckets([TensorSpec("lm_head.weight", (2,), "float32")] * 2, 64)


def test_buckets_suit_the_device_that_sends_them_unless_the_recipe_says() -> None:
    assert get_bucket_bytes(None, "cpu") == CPU_BUCKET_BYTES == 64 * 2**20
    assert get_bucket_bytes(None, "cuda") == GPU_BUCKET_BYTES == 512 * 2**20
    assert get_bucket_bytes(4096, "cuda") == get_bucket_bytes(4096, "cpu") == 4096
