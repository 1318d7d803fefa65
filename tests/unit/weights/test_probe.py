"""When log-probabilities of the fixed prompt agree, and which prompt it is."""

import math

import pytest

from areal_hpc.errors import WeightSyncError
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.buckets import TensorSpec
from areal_hpc.weights.update import (
    PROBE_TOKENS,
    Probe,
    check_probe,
    choose_probe_ids,
    get_max_probe_gap,
)

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


def test_broken_weights_of_the_trainer_are_named() -> None:
    with pytest.raises(WeightSyncError, match="the trainer's own are no numbers"):
        check_probe(Probe([5, 6], [math.nan]), [math.nan], 1.0, "replica 0")


def test_the_bound_is_that_of_the_type_that_rounds_most() -> None:
    specs = [TensorSpec("bias", (4,), "float32"), TensorSpec("weight", (4,), "bfloat16")]
    assert get_max_probe_gap(WeightsConfig(), specs[:1]) == 1e-3
    assert get_max_probe_gap(WeightsConfig(), specs) == 0.25
    assert get_max_probe_gap(WeightsConfig(max_probe_gap=0.5), specs) == 0.5
