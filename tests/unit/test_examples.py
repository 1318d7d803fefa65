"""Example agents and tools: their messages to a model and their judgments, without a model."""

import json
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.agents.math_tools import call_calculator
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.paths import RunPaths
from examples.custom import sorting
from examples.quickstart.task import demonstrations, train_tasks, valid_tasks, verify
from examples.search.agent import Index, hotpot
from examples.tools.calculator import calculate
from tests.support.commands import run_program, said_by
from tests.support.environments import CHECKOUT
from tests.support.sample_trajectories import seal_in, trajectory


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"expression": "12 * (3 + 4)"}', "84"),
        ('{"expression": "1/3 + 1/6"}', "1/2"),
        ('{"expression": "1/0"}', "error: division by zero"),
        ('{"expression": "2**9"}', "error: give an expression"),
        ('{"expression": 7}', "error: give an expression"),
        ("7", "error: give an expression"),
        ("{", "error: give an expression"),
    ],
)
def test_the_calculator_is_exact_and_survives_the_model(arguments: str, result: str) -> None:
    assert calculate(arguments).startswith(result)


def test_a_question_of_hotpotqa_brings_its_passages() -> None:
    context = {"title": ["Kiel", "Ulm"], "sentences": [["A port.", " In the north."], ["Inland."]]}
    row = {"question": "Which is a port?", "answer": "Kiel", "context": context}
    task = hotpot(row)
    assert task is not None
    assert task["messages"][0]["content"].startswith("Which is a port? Search")
    index = Index(task["passages"])
    assert index.search("port in the north") == [{"title": "Kiel", "text": "A port. In the north."}]
    assert hotpot({**row, "answer": "yes"}) is None


def test_the_own_tasks_have_the_own_reward_and_filter() -> None:
    for task in sorting.tasks(size=3, seed=1):
        right = " ".join(map(str, sorted(task["numbers"])))
        assert sorting.sorting_reward("", f"so:\n{right}", [], [], **task) == 1.0
        assert sorting.sorting_reward("", "no idea", [], [], **task) == 0.0
    assert list(sorting.tasks(3, 1)) == list(sorting.tasks(3, 1))
    for rewards, kept in (([0, 0], False), ([1, 1], False), ([0, 1], True)):
        group = {"rewards": np.asarray(rewards, dtype=np.float32)}
        assert sorting.neither_too_easy_nor_too_hard(group) is kept


def test_a_shard_is_read_by_the_script(paths: RunPaths) -> None:
    make_tiny_model(
        paths.starting_model_dir,
        ["one two three"],
        seed=1,
        hidden=32,
        heads=2,
        kv_heads=2,
        head_dim=16,
    )
    rows = [trajectory(number, tokens=6) for number in range(2)]
    shard = seal_in(paths, rows)
    program = CHECKOUT / "examples" / "read_shard.py"
    output = said_by(
        run_program(
            sys.executable, program, paths.shards_dir / shard.file, paths.starting_model_dir
        )
    )
    for number, row in enumerate(rows):
        trained = int(np.count_nonzero(row.loss_mask_T))
        assert f"row {number}: reward {row.reward:g}, {trained} tokens trained" in output


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"expression": "2 * (3 + 4)"}', "14"),
        ('{"expression": "1 / 0"}', "error: division by zero"),
        ('{"expression": 14}', "error: give the expression as text"),
        ('{"expression": ["2 + 2"]}', "error: give the expression as text"),
        ('{"sum": "2 + 2"}', "error: give an expression"),
        ("14", "error: give an expression"),
        ("[" * 100_000, "error: give an expression"),
    ],
)
def test_a_call_of_the_calculator_ends_no_episode(arguments: str, result: str) -> None:
    assert call_calculator(arguments) == result


seeds = st.integers(0, 1000)


def questions(tasks: Iterable[dict[str, Any]]) -> set[str]:
    return {task["messages"][0]["content"] for task in tasks}


@given(seeds, seeds, seeds)
def test_held_out_questions_appear_in_no_training_data(train: int, valid: int, demo: int) -> None:
    held_out = questions(valid_tasks(50, valid))
    assert held_out.isdisjoint(questions(train_tasks(200, train)))
    assert held_out.isdisjoint(questions(demonstrations(200, demo)))


def test_same_seed_gives_the_same_tasks_and_another_one_others_all_of_them_json() -> None:
    for generator in (train_tasks, valid_tasks, demonstrations):
        tasks = list(generator(50, 1))
        assert tasks == list(generator(50, 1)) == json.loads(json.dumps(tasks))
        assert tasks != list(generator(50, 2))


@given(seeds)
def test_right_answer_is_verified_and_a_wrong_one_is_not(seed: int) -> None:
    (task,) = train_tasks(1, seed)
    answer = int(task["answer"])
    assert answer == eval(task["metadata"]["expression"])
    assert verify(f"Answer: {answer}", task)
    assert verify(f"Answer: {answer + 1}. No, Answer: {answer}.0", task)
    assert not verify(f"Answer: {answer + 1}", task)
    assert not verify(f"{answer}", task)
    assert not verify(f"Answer: {answer} or {answer + 1}", task)
    assert not verify("", task)


@given(seeds)
def test_every_demonstration_is_right(seed: int) -> None:
    for demo in demonstrations(20, seed):
        user, assistant = demo["messages"]
        expression = user["content"].split(": ")[1].removesuffix(" =")
        assert assistant["role"] == "assistant"
        assert verify(assistant["content"], {"answer": str(eval(expression))})
