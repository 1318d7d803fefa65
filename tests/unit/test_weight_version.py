"""Weight versions: order, forms, and staleness over restarts of the trainer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.wire.weight_version import GenerationFork, WeightVersion, compute_staleness_steps

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


@pytest.mark.parametrize(
    ("current", "sampled_by", "shared_steps", "steps"),
    [
        ((1, 7), (1, 5), [0], 2),
        # Generation 1 reached step 8 but only 5 was saved; generation 2 is now at 6.
        ((2, 6), (1, 8), [0, 5], 1),
        ((2, 6), (1, 4), [0, 5], 2),
        ((3, 6), (1, 8), [0, 5, 3], 3),
    ],
)
def test_staleness_counts_steps_from_the_oldest_one_that_both_generations_share(
    current: tuple[int, int], sampled_by: tuple[int, int], shared_steps: list[int], steps: int
) -> None:
    forks = [GenerationFork(generation, step) for generation, step in enumerate(shared_steps, 1)]
    assert (
        compute_staleness_steps(WeightVersion(*current), WeightVersion(*sampled_by), forks) == steps
    )
