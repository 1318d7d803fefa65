"""Published rows become tasks that can be judged; agreement with labels, and weighted parts."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_hpc import Reward
from areal_hpc.dataset.adapters import make_reasoning_tasks
from areal_hpc.dataset.sources import iterate_task_rows
from areal_hpc.errors import InvalidRewardError, RecipeError
from areal_hpc.recipe.sections.dataset import TaskSetConfig
from areal_hpc.reward.code import code_reward
from areal_hpc.reward.countdown import countdown_reward
from areal_hpc.reward.judge_check import measure_agreement
from areal_hpc.reward.math import math_reward
from areal_hpc.reward.reasoning_gym import reasoning_gym_reward

SAMPLES = Path(__file__).parents[2] / "samples"
DOUBLE = "```python\ndef double(x):\n    return x + x\n```"
TRIPLE = "```python\ndef triple(x: int) -> int:\n    return x * 3\n```"
ADD = "```python\nprint(sum(map(int, input().split())))\n```"


def tasks(form: str, file: str) -> list[dict[str, Any]]:
    config = TaskSetConfig(path=SAMPLES / file, to_task=f"areal_hpc.dataset.adapters:{form}")
    return list(iterate_task_rows(config, "train_dataset"))


@pytest.mark.parametrize(
    ("form", "file", "right"),
    [
        ("convert_gsm8k", "gsm8k.parquet", ["so \\boxed{7}", "\\boxed{2400}"]),
        ("convert_gsm8k", "gsm8k_saved/train", ["so $7$", "It is 2,400"]),
        ("convert_competition_math", "math.jsonl", ["\\boxed{0.25}", "\\boxed{\\{2, -2\\}}"]),
        ("convert_aime", "aime.jsonl", ["\\boxed{24}", "\\boxed{56}"]),
    ],
)
def test_mathematics_is_judged_by_its_value(form: str, file: str, right: list[str]) -> None:
    for task, answer in zip(tasks(form, file), right, strict=True):
        assert math_reward("", answer, [], [], **task) == 1.0
        assert math_reward("", "\\boxed{13}", [], [], **task) == 0.0
        assert math_reward("", "I do not know", [], [], **task) == 0.0


def test_countdown_is_judged_exactly() -> None:
    first, second = tasks("convert_countdown", "countdown.jsonl")
    assert "98" in first["messages"][0]["content"]
    for answer, reward in (
        ("<answer>44 + 19 + 35</answer>", 1.0),
        ("<answer>(44+19)+35 = 98</answer>", 1.0),
        ("\\boxed{44+19+35}", 1.0),
        ("<answer>98</answer>", 0.0),
        ("<answer>44+19+35+0</answer>", 0.0),
        ("<answer>44+19+44-9</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("<answer>9**9**9</answer>", 0.0),
        ("<answer>44/(19-19)</answer>", 0.0),
        (f"<answer>{'(' * 250}1</answer>", 0.0),
        ("44+19+35", 0.0),
        ("<answer>44+19+35=99</answer>", 0.0),
        ("<answer>44+19+35 = 63+35 = 98</answer>", 1.0),
        ("<answer>44+19+35 = 63+34 = 98</answer>", 0.0),
    ):
        assert countdown_reward("", answer, [], [], **first) == reward, answer
    assert countdown_reward("", "<answer>5*4/2-3</answer>", [], [], **second) == 1.0
    assert countdown_reward("", "<answer>5+4-2</answer>", [], [], **second) == 0.0
    on_the_way = "<answer>8/(3-8/3)</answer>"
    assert countdown_reward("", on_the_way, [], [], target=24, numbers=[3, 3, 8, 8]) == 1.0


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ("convert_mbpp", DOUBLE, DOUBLE.replace("x + x", "x * x")),
        ("convert_humaneval", TRIPLE, TRIPLE.replace("3", "2")),
        ("convert_apps", ADD, ADD.replace("sum", "max")),
    ],
)
def test_programs_are_judged_by_their_tests(form: str, right: str, wrong: str) -> None:
    (task,) = tasks(form, f"{form.removeprefix('convert_')}.jsonl")
    assert code_reward("", right, [], [], **task) == 1.0
    assert code_reward("", wrong, [], [], **task) == 0.0
    assert code_reward("", right.replace("```", ""), [], [], **task) == 0.0


def test_a_program_that_leaves_before_its_tests_has_not_passed_them() -> None:
    (task,) = tasks("convert_mbpp", "mbpp.jsonl")
    for leaving in ("import sys; sys.exit(0)", "import os; os._exit(0)"):
        assert code_reward("", f"```python\n{leaving}\n```", [], [], **task) == 0.0


def test_reasoning_gym_judges_its_own_tasks() -> None:
    for task in make_reasoning_tasks("chain_sum", size=2, seed=3):
        right = f"<answer>{task['answer']}</answer>"
        assert reasoning_gym_reward("", right, [], [], **task) == 1.0
        assert reasoning_gym_reward("", "<answer>no</answer>", [], [], **task) < 0.5


def test_no_reply_runs_or_changes_a_score(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("spiral_matrix", "polynomial_multiplication"):
        (task,) = make_reasoning_tasks(name, size=1, seed=3)
        marker = tmp_path / name
        for payload in (
            f"open({str(marker)!r},'w').write('1')",
            f"[open({str(marker)!r},'w').write('1')]",
            "[setattr(__import__('reasoning_gym').algorithmic.spiral_matrix.SpiralMatrixDataset,"
            "'score_answer',lambda s,answer,entry:1.0)]",
            "[__import__('os')._exit(0)]",
            "().__class__.__base__",
        ):
            assert reasoning_gym_reward("", f"<answer>{payload}</answer>", [], [], **task) < 0.5
        assert not marker.exists()
        assert reasoning_gym_reward("", "<answer>7</answer>", [], [], **task) < 0.5
        right = f"<answer>{task['answer']}</answer>"
        assert reasoning_gym_reward("", right, [], [], **task) == 1.0
    assert "has ended" not in caplog.text  # as of a process whose payload ran


def test_a_set_that_reasoning_gym_has_not_is_the_recipe_s_fault() -> None:
    with pytest.raises(RecipeError, match="cannot score tasks of 'none'"):
        reasoning_gym_reward("", "1", [], [], metadata={"source_dataset": "none"})


def test_agreement_of_equal_opposite_and_random_values() -> None:
    labels = [0.0, 0.25, 0.75, 1.0]
    same = measure_agreement(labels, labels)
    assert (same.mean_difference, same.mean_abs_difference) == (0.0, 0.0)
    assert (same.rank_correlation, same.kappa) == pytest.approx((1.0, 1.0))
    opposite = measure_agreement(labels[::-1], labels)
    assert (opposite.rank_correlation, opposite.kappa) == pytest.approx((-1.0, -1.0))
    generator = np.random.default_rng(1)
    values, others = generator.random(4000), generator.random(4000)
    random = measure_agreement(list(values), list(others))
    assert abs(random.rank_correlation) < 0.05
    assert abs(random.kappa) < 0.05
    squared = measure_agreement(list(values**2), list(values))
    assert squared.rank_correlation == pytest.approx(1.0), "ranks alone count"


def test_agreement_by_hand_with_ties() -> None:
    stats = measure_agreement([1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.25, 0.0])
    assert stats.mean_difference == pytest.approx(0.1875)
    # Ranks 3.5, 1.5, 1.5, 3.5 and 4, 1.5, 3, 1.5.
    assert stats.rank_correlation == pytest.approx(np.corrcoef([3.5, 1.5, 1.5, 3.5],
                                                               [4, 1.5, 3, 1.5])[0, 1])  # fmt: skip
    assert stats.kappa == pytest.approx((0.75 - 0.5) / 0.5)


def test_agreement_where_nothing_varies() -> None:
    stats = measure_agreement([1.0, 1.0], [1.0, 1.0])
    assert math.isnan(stats.rank_correlation)
    assert math.isnan(stats.kappa)
    with pytest.raises(ValueError, match="expected a label for each value, got 1 and 0"):
        measure_agreement([1.0], [])


def test_a_reward_of_weighted_parts() -> None:
    weights = {"correct": 0.8, "style": 0.2}
    reward = Reward.from_weighted_parts({"correct": 1.0, "style": 0.4}, weights, note="kind")
    assert reward.value == pytest.approx(0.88)
    assert reward.parts == pytest.approx({"correct": 0.8, "style": 0.08})
    assert reward.metrics == {"correct": 1.0, "style": 0.4}
    assert reward.note == "kind"
    with pytest.raises(InvalidRewardError, match="expected a weight for each part"):
        Reward.from_weighted_parts({"correct": 1.0}, weights)
