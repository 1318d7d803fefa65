"""What the example agents tell the model, and how they judge it, without a model."""

import sys

import numpy as np
import pytest

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.paths import RunPaths
from examples.custom import sorting
from examples.search.agent import Index, hotpot
from examples.tools.calculator import calculate
from tests.support.commands import run_program, said_by
from tests.support.environments import CHECKOUT
from tests.support.sample_trajectories import seal_in, trajectory


@pytest.mark.parametrize(
    ("arguments", "told"),
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
def test_the_calculator_is_exact_and_survives_the_model(arguments: str, told: str) -> None:
    assert calculate(arguments).startswith(told)


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
    said = said_by(
        run_program(
            sys.executable, program, paths.shards_dir / shard.file, paths.starting_model_dir
        )
    )
    for number, row in enumerate(rows):
        trained = int(np.count_nonzero(row.loss_mask_T))
        assert f"row {number}: reward {row.reward:g}, {trained} tokens trained" in said
