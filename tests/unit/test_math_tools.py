"""What a model is told of its calls of the calculator, whatever it writes."""

import pytest

from areal_hpc.agents.math_tools import call_calculator


@pytest.mark.parametrize(
    ("arguments", "told"),
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
def test_a_call_of_the_calculator_ends_no_episode(arguments: str, told: str) -> None:
    assert call_calculator(arguments) == told
