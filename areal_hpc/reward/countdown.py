"""Reward for the countdown game: reach a target with every given number used exactly once."""

import ast
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from areal_hpc.errors import InvalidArithmeticError
from areal_hpc.reward.answer_extraction import (
    extract_boxed,
    extract_tagged,
    replace_typographic_minus,
)

MAX_EXPRESSION_CHARS = 300
_OPERATOR_BY_NODE_TYPE: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown_reward(
    prompt: Any,
    completions: str,
    prompt_ids: Any,
    completion_ids: Any,
    target: int,
    numbers: Sequence[int],
    **task: Any,
) -> float:
    r"""Return 1.0 if the expression equals `target` and uses each number once, else 0.0.

    The expression is the content of the last `<answer>...</answer>` or `\boxed{...}`. In an
    equation it is the left side, and all sides must equal the target. Arithmetic is exact, in
    fractions.
    """
    text = extract_tagged(completions) or extract_boxed(completions)
    if text is None:
        return 0.0
    try:
        equation = text.rstrip(". ").split("=")
        sides = [evaluate_expression(side) for side in equation]
    except (InvalidArithmeticError, ZeroDivisionError):
        return 0.0
    _, used = sides[0]
    equals_target = all(value == target for value, _ in sides)
    return float(equals_target and sorted(used) == sorted(numbers))


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """Evaluate an expression, and return its value and the numbers in it.

    Raises:
        InvalidArithmeticError: It has more than whole numbers, `+ - * /` and parentheses.
        ZeroDivisionError: It divides by zero.
    """
    text = text.strip().replace("\u00d7", "*").replace("\u00f7", "/")
    text = replace_typographic_minus(text)
    if len(text) > MAX_EXPRESSION_CHARS:
        raise InvalidArithmeticError(f"{len(text)} characters")
    try:
        tree = ast.parse(text, mode="eval")
        numbers: list[int] = []
        return _evaluate_node(tree.body, numbers), numbers
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidArithmeticError(text) from error


def _evaluate_node(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATOR_BY_NODE_TYPE:
        left, right = _evaluate_node(node.left, numbers), _evaluate_node(node.right, numbers)
        return _OPERATOR_BY_NODE_TYPE[type(node.op)](left, right)
    raise InvalidArithmeticError(ast.dump(node)[:80])
