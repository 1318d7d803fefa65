"""Which size buckets have where the recipe leaves it open."""

import pytest

from areal_hpc.weights.config import WeightsConfig


@pytest.mark.parametrize(
    ("settings", "backend", "mib"),
    [
        ({}, "gloo", 16),
        ({}, "nccl", 64),
        ({"transport": "disk"}, "gloo", 64),
        ({"bucket_bytes": 2**20}, "gloo", 1),
        ({"bucket_bytes": 2**20, "transport": "disk"}, "nccl", 1),
    ],
)
def test_the_size_of_a_bucket_follows_from_its_way_unless_it_is_given(
    settings: dict[str, object], backend: str, mib: int
) -> None:
    config = WeightsConfig.model_validate(settings)
    assert config.bucket_bytes_over(backend) == mib * 2**20
