"""GSM8K's answers are compared as numbers."""

import pytest

from areal_hpc.reward.gsm8k import gsm8k_reward_fn


@pytest.mark.parametrize(
    ("said", "answer", "reward"),
    [
        ("3 apples and 4 are \\boxed{7}.", "7", 1.0),
        ("so #### 1,234", "1 + 1233 = 1234\n#### 1,234", 1.0),
        ("it costs $12.50", "12.5", 1.0),
        ("a half: 1/2", "0.5", 1.0),
        ("7, no: \\boxed{8} of 7", "7", 0.0),
        ("-7", "7", 0.0),
        ("no idea", "7", 0.0),
        ("\\boxed{}, or 7", "7", 0.0),
        ("1/0", "7", 0.0),
        ("#### 1.5/2", "7", 0.0),
        ("\\boxed{1{,}234}", "1234", 1.0),
        ("\\boxed{12\\,345,\\!678}", "12345678", 1.0),
        ("\\boxed{(1\\,23)}", "23", 1.0),
        ("\\boxed{7}", 7, 1.0),
        ("\\boxed{0.5}", 0.5, 1.0),
        ("The answer is \u221242", "42", 0.0),
        ("The answer is \u221242", "-42", 1.0),
        ("The answer is \uff0d42", "-42", 1.0),
        ("1,2,3,4", "1234", 0.0),
        ("12,34", "1234", 0.0),
        ("he pays 1,234, in all", "1234", 1.0),
        ("1,234,567.5", "1234567.5", 1.0),
        ("1,2345", "12345", 0.0),
        ("7, and no end of it: " + "9" * 5000, "7", 0.0),
    ],
)
def test_the_last_number_counts(said: str, answer: str | float, reward: float) -> None:
    assert gsm8k_reward_fn(None, said, None, None, answer) == reward


def test_a_task_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="contains no number"):
        gsm8k_reward_fn(None, "7", None, None, "seven")
