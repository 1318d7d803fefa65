import json
from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from examples.quickstart.task import demonstrations, train_tasks, valid_tasks, verify

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
