from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.config import WeightsConfig
from areal_hpc.weights.delta import Bytes, apply, encode

WORDS = 70_000
"""More than one block."""


def buckets(word_bytes: int, changed: int, seed: int) -> tuple[Bytes, Bytes]:
    generator = np.random.default_rng(seed)
    old = generator.integers(0, 256, WORDS * word_bytes, dtype=np.uint8)
    new = old.copy()
    places = generator.choice(WORDS, changed, replace=False)
    new.view(f"<u{word_bytes}")[places] ^= 1
    return old, new


@given(
    word_bytes=st.sampled_from([1, 2, 4, 8]),
    changed=st.integers(0, WORDS // 10),
    seed=st.integers(0, 1000),
)
def test_changes_make_the_new_bucket_of_the_old(word_bytes: int, changed: int, seed: int) -> None:
    old, new = buckets(word_bytes, changed, seed)
    delta = encode(old, new, word_bytes)
    assert delta is not None
    assert len(delta) <= 64 + changed * (2 + word_bytes)
    apply(old, delta)
    assert np.array_equal(old, new)


def test_what_has_changed_too_much_is_sent_whole() -> None:
    old, new = buckets(2, WORDS, 0)
    assert encode(old, new, 2) is None


@pytest.mark.parametrize("damage", [b"", b"ADELTA01", b"x" * 40])
def test_changes_that_are_none_are_refused(damage: bytes) -> None:
    with pytest.raises(WeightSyncError, match="expected"):
        apply(np.zeros(16, np.uint8), damage)


def test_changes_of_another_bucket_or_cut_short_are_refused() -> None:
    delta = encode(*buckets(2, 10, 0), 2)
    assert delta is not None
    for target, given_delta in ((np.zeros(16, np.uint8), delta), (buckets(2, 0, 0)[0], delta[:-1])):
        with pytest.raises(WeightSyncError, match="changes of a bucket"):
            apply(target, given_delta)


@pytest.mark.parametrize("place", [32, 36, 40], ids=["first block", "last block", "a place"])
def test_changes_that_were_damaged_are_refused_or_come_out_otherwise(place: int) -> None:
    """Never an error that a relay does not expect: the digest tells what came out otherwise."""
    old, new = buckets(2, 10, 0)
    delta = bytearray(encode(old, new, 2) or b"")
    delta[place] ^= 0x55
    with suppress(WeightSyncError):
        apply(old, bytes(delta))
    assert not np.array_equal(old, new)


def test_changes_beyond_the_bucket_are_refused() -> None:
    old = np.zeros(WORDS * 2, np.uint8)
    new = old.copy()
    new[-1] = 1  # in the last block, which is not full
    delta = bytearray(encode(old, new, 2) or b"")
    delta[-4:-2] = b"\xff\xff"  # its place
    with pytest.raises(WeightSyncError, match="below 70000, got 131071"):
        apply(old, bytes(delta))


def test_changes_travel_by_disk_alone() -> None:
    with pytest.raises(ValueError, match="transport=disk"):
        WeightsConfig(delta=True)
