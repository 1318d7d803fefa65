"""Worker of `reasoning_gym_reward`, which scores answers by reasoning-gym, each in a fork.

The scorers of nine sets evaluate a reply as Python. An audit hook lets such text only compute with
numbers and names; text that evades it still runs in an isolated process (`worker_loop.py`).
"""

import builtins
import contextlib
import dis
import gc
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import literals
import reasoning_gym
from sympy.parsing.sympy_parser import parse_expr
from worker_loop import Scorer, serve

COMPUTING_BUILTINS = frozenset(
    function.__name__
    for function in (
        *(abs, all, any, bool, complex, dict, divmod, enumerate, float, frozenset, int, len, list),
        *(max, min, pow, range, reversed, round, set, slice, sorted, str, sum, tuple, zip),
    )
)
"""Built-in functions that evaluated text may call."""
_REFUSED_INSTRUCTIONS = ("ATTR", "METHOD")


class ReasoningGymScorer(Scorer):
    """Scorer of answers to tasks of all of reasoning-gym's sets."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._scorers: dict[str, Callable[[str, dict[str, Any]], float]] = {}
        keep_names_of_sympy()

    def prepare(self, task: dict[str, Any]) -> None:
        """Build the scorer of a set, once for all its tasks.

        It first scores a task of the library, so that its imports and caches are made here and not
        again in each fork.
        """
        name = task["set"]
        if name not in self._scorers:
            scorer = reasoning_gym.get_score_answer_fn(name)
            with contextlib.suppress(Exception):  # boundary: a composite set creates no task
                (own,) = reasoning_gym.create_dataset(name, size=1, seed=1)
                scorer(own["answer"], own)
            self._scorers[name] = scorer
            gc.freeze()

    def score(self, task: dict[str, Any]) -> dict[str, Any]:
        """Score the answer of a task."""
        entry = literals.decode(task["entry"], refuse_reference)
        sys.addaudithook(refuse_programs)
        return {"reward": float(self._scorers[task["set"]](task["given"], entry))}


def keep_names_of_sympy() -> None:
    """Let `parse_expr` reuse one dict of sympy's names.

    By itself it builds the dict for each text, which touches a thousand objects, so that each fork
    copies the pages in which they lie.
    """
    sympy_names: dict[str, Any] = {}

    def keep(tokens: Any, local_names: Any, names: dict[str, Any]) -> Any:
        sympy_names.update(names)
        return tokens

    parse_expr("1", transformations=(keep,))
    keys = [*inspect.signature(parse_expr).parameters][1:]
    defaults = dict(zip(keys, parse_expr.__defaults__, strict=True))
    parse_expr.__defaults__ = tuple((defaults | {"global_dict": sympy_names}).values())


def refuse_reference(number: int) -> Any:
    """Refuse a reference to an object, as all values must be literals."""
    raise ValueError(f"object {number}")


def refuse_programs(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to execute text that does more than compute (PEP 578)."""
    if event == "exec" and arguments[0].co_filename.startswith("<"):
        codes = [*walk_code(arguments[0])]
        # Scorers evaluate replies as expressions, whose functions have no names. Text that defines
        # functions comes from libraries, such as dataclasses and named tuples.
        is_expression = all(code.co_name.startswith("<") for code in codes)
        if is_expression and any(map(does_more_than_compute, codes)):
            raise ValueError("an answer is no program")


def walk_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object, and those of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from walk_code(constant)


def does_more_than_compute(code: types.CodeType) -> bool:
    """Return whether code accesses attributes, or uses names that lead to more than values."""
    accesses_attributes = any(
        word in op.opname for op in dis.get_instructions(code) for word in _REFUSED_INSTRUCTIONS
    )
    return accesses_attributes or any(
        name.startswith("_") or (hasattr(builtins, name) and name not in COMPUTING_BUILTINS)
        for name in code.co_names
    )


if __name__ == "__main__":
    serve(ReasoningGymScorer)
