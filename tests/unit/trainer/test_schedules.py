import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.recipe.sections.trainer import AdamConfig, compute_learning_rate
from areal_hpc.trainer.model.cpu import megatron_cpu  # noqa: F401  (before anything of Megatron)

# isort: split
from areal_hpc.trainer.loop.schedule import EvaluationSetSchedule, Schedule
from areal_hpc.trainer.sft import get_batch_indices


def test_the_rate_climbs_then_stays() -> None:
    config = AdamConfig(lr=1.0, warmup_steps=4)
    rates = [compute_learning_rate(step, 100, config) for step in range(6)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_rate_decays_to_its_floor(decay: str) -> None:
    config = AdamConfig.model_validate({"lr": 1.0, "decay": decay, "min_lr_ratio": 0.1})
    rates = [compute_learning_rate(step, 51, config) for step in range(51)]
    assert rates[0] == pytest.approx(1.0)
    assert rates[25] == pytest.approx(0.55)
    assert rates[50] == pytest.approx(0.1)
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_decay_begins_at_the_peak_that_the_warm_up_reached(decay: str) -> None:
    config = AdamConfig.model_validate(
        {"lr": 1.0, "decay": decay, "min_lr_ratio": 0.1, "warmup_steps": 5}
    )
    rates = [compute_learning_rate(step, 20, config) for step in range(20)]
    assert rates[4] == rates[5] == pytest.approx(1.0)
    assert rates[19] == pytest.approx(0.1)


def test_a_schedule_of_its_own_stays_when_the_run_grows() -> None:
    decay = {"lr": 1.0, "decay": "cosine"}
    stretched, fixed = (AdamConfig.model_validate(decay | more) for more in (
        {}, {"schedule_steps": 100},
    ))  # fmt: skip
    before = [compute_learning_rate(step, 100, stretched) for step in range(100)]
    assert [compute_learning_rate(step, 200, fixed) for step in range(100)] == before
    assert compute_learning_rate(150, 200, fixed) == 0.0
    assert compute_learning_rate(80, 200, stretched) > 5 * before[80]


def test_steps_are_evaluated_saved_and_exported_as_asked() -> None:
    schedule = Schedule(
        total_steps=7,
        checkpoint_every_steps=3,
        export_every_steps=0,
        evaluations={"valid": EvaluationSetSchedule(5, 8)},
    )
    steps = range(8)
    assert [step for step in steps if schedule.evaluates(step)] == [0, 5, 7]
    assert (schedule.list_evaluation_steps(-1, 7), schedule.list_evaluation_steps(0, 6)) == (
        [0, 5, 7],
        [5],
    )
    assert [step for step in steps if schedule.saves_checkpoint(step)] == [3, 6, 7]
    assert [step for step in steps if schedule.exports_model(step)] == [7]


def test_each_evaluation_set_has_its_own_steps_and_all_have_the_first_and_the_last() -> None:
    sets = {
        "valid": EvaluationSetSchedule(2, 8),
        "aime": EvaluationSetSchedule(3, 30),
        "final": EvaluationSetSchedule(0, 5),
    }
    schedule = Schedule(7, 3, None, sets)
    due = [list(schedule.count_tasks_by_due_set(step)) for step in range(8)]
    every, two = ["valid", "aime", "final"], ["valid", "aime"]
    assert due == [every, [], ["valid"], ["aime"], ["valid"], [], two, every]
    assert schedule.count_tasks_by_set_due_since(2, 5) == {"aime": 30, "valid": 8}
    assert schedule.count_tasks_by_set_due_since(4, 5) == {}


@given(st.integers(1, 20), st.integers(1, 8), st.integers(0, 1000))
def test_each_pass_shows_every_demonstration_once(size: int, batch: int, seed: int) -> None:
    steps = -(-3 * size // batch)
    shown = [index for step in range(steps) for index in get_batch_indices(step, batch, size, seed)]
    for turn in range(3):
        assert sorted(shown[turn * size : (turn + 1) * size]) == list(range(size))
