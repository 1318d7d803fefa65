import math
from pathlib import Path
from typing import Literal

import pytest

from areal_hpc.errors import NonFiniteGradientError, ShardError
from areal_hpc.rundir.checkpoints import QuarantineCause, UntrainedBatchPart
from areal_hpc.trainer.untrained import (
    build_damaged_batch_record_or_raise,
    build_nonfinite_records_or_raise,
    build_norm_metrics,
    is_optimizer_step_taken,
)


def judge(
    norms: list[float],
    step: int,
    earlier: list[UntrainedBatchPart],
    on_nonfinite: Literal["skip", "stop"] = "skip",
) -> list[UntrainedBatchPart]:
    return build_nonfinite_records_or_raise(
        norms, step, earlier, on_nonfinite,
        section="trainer.optimizer", name_step="batch {}".format, hint="try something",
    )  # fmt: skip


def streak(norms: list[float]) -> list[UntrainedBatchPart]:
    """What a run of batches of one optimizer step leaves untrained."""
    found: list[UntrainedBatchPart] = []
    for step, norm in enumerate(norms, 1):
        found += judge([norm], step, found)
    return found


def test_two_odd_batches_in_a_row_are_passed_over_and_a_third_is_not() -> None:
    odd = math.nan
    assert [one.step for one in streak([odd, odd, 1.0, odd, odd, 0.0, odd])] == [1, 2, 4, 5, 7]
    with pytest.raises(NonFiniteGradientError) as caught:
        streak([1.0, odd, math.inf, odd])
    assert caught.value.exit_code == 70
    problem = caught.value.problems[0]
    assert problem.message.startswith("batch 4: the gradient norm is nan")
    assert "the same as at batch 2 and batch 3" in problem.message
    assert (problem.key, problem.hint) == ("trainer.optimizer.on_nonfinite", "try something")


def test_tickets_left_out_of_earlier_batches_are_no_part_of_a_streak() -> None:
    earlier = [UntrainedBatchPart(1, "unsound", [4]), UntrainedBatchPart(2, "unsound", [5])]
    assert [one.step for one in judge([math.nan], 3, earlier)] == [3]


RUN = Path("/my runs/a")


def quarantined(step: int, cause: QuarantineCause = "damaged") -> UntrainedBatchPart:
    return UntrainedBatchPart(step, "reason", quarantine=cause)


def test_a_third_batch_in_a_row_that_cannot_be_read_ends_the_run() -> None:
    earlier = [quarantined(2), quarantined(4), quarantined(5)]
    assert build_damaged_batch_record_or_raise(1, [], "gone", RUN) == UntrainedBatchPart(
        1, "gone", [], "damaged"
    )
    assert build_damaged_batch_record_or_raise(7, earlier, "gone", RUN).step == 7
    with pytest.raises(ShardError) as caught:
        build_damaged_batch_record_or_raise(6, earlier, "gone", RUN)
    assert caught.value.exit_code == 65
    problem = caught.value.problems[0]
    assert problem.message.startswith("batch 6 cannot be read: gone; nor could batch 4 and batch 5")
    assert "areal-hpc quarantine '/my runs/a' 6" in problem.hint


def test_streaks_of_gradients_of_damage_and_of_requests_are_apart() -> None:
    odd, asked = UntrainedBatchPart(5, "the gradient norm is nan"), quarantined(5, "requested")
    for between in (odd, asked):
        assert (
            build_damaged_batch_record_or_raise(6, [quarantined(4), between], "gone", RUN).step == 6
        )
    assert judge([math.nan], 6, [UntrainedBatchPart(4, "nan"), quarantined(5)])[0].step == 6


def test_a_batch_of_several_optimizer_steps_says_how_many_were_odd() -> None:
    (found,) = judge([1.0, math.inf, 2.0, math.nan], 7, [])
    assert found.reason == "the gradient norm is inf: 2 of 4 optimizer steps are not taken"
    assert (found.step, found.tickets) == (7, [])


def test_a_run_that_is_to_stop_names_the_way_past() -> None:
    with pytest.raises(NonFiniteGradientError, match=r"set trainer\.optimizer\.on_nonfinite=skip"):
        judge([math.nan], 1, [], "stop")


def test_steps_that_are_not_taken_are_counted_by_their_norms() -> None:
    assert [*map(is_optimizer_step_taken, (1.0, 0.0, math.inf, math.nan))] == [
        True,
        False,
        False,
        False,
    ]
    assert build_norm_metrics([0.5, 2.0]) == {
        "grad_norm": 2.0, "step/skipped": 0, "step/nonfinite": 0,
    }  # fmt: skip
    assert build_norm_metrics([]) == {"grad_norm": 0.0, "step/skipped": 1, "step/nonfinite": 0}
    warm_up = {"grad_norm": 0.0, "step/skipped": 0, "step/nonfinite": 0}
    assert build_norm_metrics([0.0, 0.0], were_due=False) == warm_up
    for odd in (math.nan, math.inf):
        found = build_norm_metrics([1.0, 0.0, odd, 2.0])
        assert (found["step/skipped"], found["step/nonfinite"]) == (2, 1)
        assert not math.isfinite(found["grad_norm"])
