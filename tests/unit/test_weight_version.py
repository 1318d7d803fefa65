"""Weight versions: order, forms, and staleness over restarts of the trainer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.wire.weight_version import GenerationFork, WeightVersion, compute_staleness

versions = st.builds(WeightVersion, st.integers(0, 2**20), st.integers(0, 2**31))


@given(versions)
def test_both_forms_round_trip(version: WeightVersion) -> None:
    assert WeightVersion.parse(str(version)) == version
    assert WeightVersion.unpack(version.packed) == version


@given(versions, versions)
def test_packed_versions_keep_their_order(one: WeightVersion, other: WeightVersion) -> None:
    assert (one < other) == (one.packed < other.packed)


@pytest.mark.parametrize("text", ["", "3", "3.", ".3", "a.b", "default", "1.-2"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"generation\.step"):
        WeightVersion.parse(text)


def test_staleness_counts_steps_within_an_generation() -> None:
    assert compute_staleness(WeightVersion(1, 7), WeightVersion(1, 5), [GenerationFork(1, 0)]) == 2


def test_unsaved_steps_of_an_abandoned_generation_count_from_the_common_ancestor() -> None:
    forks = [GenerationFork(1, 0), GenerationFork(2, 5)]
    # Generation 1 reached step 8 but only 5 was saved; generation 2 is now at 6.
    assert compute_staleness(WeightVersion(2, 6), WeightVersion(1, 8), forks) == 1
    assert compute_staleness(WeightVersion(2, 6), WeightVersion(1, 4), forks) == 2


def test_several_restarts_use_the_oldest_shared_step() -> None:
    forks = [GenerationFork(1, 0), GenerationFork(2, 5), GenerationFork(3, 3)]
    assert compute_staleness(WeightVersion(3, 6), WeightVersion(1, 8), forks) == 3
