"""Hostile replies to other libraries' scorers: none runs, none changes a later score.

All sets of reasoning-gym, and the two rewards of mathematics.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from areal_hpc.reward.gsm8k import gsm8k_reward_fn
from areal_hpc.reward.math import math_reward
from areal_hpc.reward.reasoning_gym import reasoning_gym_reward

pytestmark = [
    pytest.mark.timeout(1800),
    # Files that reasoning-gym and what it imports leave open.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
END = "__import__('os')._exit(0)"
"""Payload that ends its process if it runs, which shows."""
FORGED = "__import__('os').write(fd, bytes([123, 34, 114, 101, 119, 97, 114, 100]))"
WAYS = (
    *(END, f"[{END}]", f"({END},)", f"{{{END}}}", f"{{1: {END}}}", f"x*{END}"),
    f"1 if {END} else 0",
    *(f"[{END} for _ in range(1)]", f"(lambda: {END})()", f"max([1], key=lambda _: {END})"),
    *(f"[*map(lambda _: {END}, [0])]", f"sorted([1], key=lambda _: {END})", f"f'{{{END}}}'"),
    *(f"(y := {END})", f"[[{END}]]", f"not {END}", f"{END} + 1", f"1,{END}", f"{END}\n2"),
    *(f'eval("{END}")', f'exec("{END}")', f'eval(compile("{END}", "/usr/x.py", "eval"))'),
    *(f'sympify("{END}")', f'S("{END}")', f'parse_expr("{END}")', f'N("{END}")'),
    f'Symbol("{END}")',
    *(f'lambdify(x, "{END}")(1)', f'Lambda(x, "{END}")(1)', f'simplify("{END}")'),
    *("open('/tmp/marker','w').write('1')", "[open('/tmp/marker','w')]", "print(1)", "input()"),
    *("breakpoint()", "exit(0)", "quit()", "vars()", "globals()", "help()", "getattr(x, 'y')"),
    "[setattr(x, 'score_answer', lambda s, answer, entry: 1.0) for x in [x]]",
    "().__class__.__mro__[1].__subclasses__()",
    "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close']",
    "(lambda: 0).__globals__['__builtins__']",
    "re.sys.modules['os']._exit(0)",
    "random._os._exit(0)",
    "ast.sys.modules['posix']._exit(0)",
    "sympy.sys.modules['posix']._exit(0)",
    "(x for x in [1]).gi_frame.f_back.f_globals",
    "[gc for gc in [1]].append(1)",
    "x.__class__.__init__.__globals__",
    "Symbol.__mro__",
    "''.join(['a'])",
    "'{0.__class__}'.format(1)",
    f"[{FORGED} for fd in range(3, 64)]",
    f"[{FORGED} for fd in range(64)]",
    "[setattr(__import__('reasoning_gym').factory, 'DATASETS', {})]",
    "type('A', (), {'__eq__': lambda s, o: True})()",
    "memoryview(b'1').obj",
    "delattr(x, 'y')",
    "object.__subclasses__()",
)
assert len(WAYS) >= 60


def iterate_tasks() -> Iterator[dict[str, Any]]:
    for name in sorted(DATASETS):
        try:
            yield reasoning_gym.create_dataset(name, size=1, seed=7)[0]
        except (AssertionError, ImportError, ValueError) as error:  # a set of sets, or of another's
            print(f"{name} makes no task: {error}")


def score(task: dict[str, Any], answer: str) -> float:
    row = {name: task[name] for name in ("question", "answer", "metadata")}
    return reasoning_gym_reward("", f"<answer>{answer}</answer>", [], [], **row)


def test_no_reply_runs_or_changes_a_later_score(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [*iterate_tasks()]
    assert len(tasks) >= 95
    for task in tasks:
        name = task["metadata"]["source_dataset"]
        of_library = reasoning_gym.get_score_answer_fn(name)
        right = str(task["answer"])
        usual = float(of_library(right, task))
        assert score(task, right) == usual, name
        junk = score(task, "junk that is nothing")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for way in WAYS:
                assert score(task, way) <= max(junk, 0.999), (name, way)
        assert "has ended" not in caplog.text, name
        assert "took longer" not in caplog.text, name
        assert score(task, right) == usual, name


@pytest.mark.parametrize("reward", [math_reward, gsm8k_reward_fn])
def test_no_reply_runs_as_mathematics(
    reward: Callable[..., float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for way in WAYS:
            assert reward("", f"\\boxed{{{way}}}", [], [], answer="7777") == 0.0
    assert "ended its process" not in caplog.text
    assert reward("", "\\boxed{7777}", [], [], answer="7777") == 1.0
