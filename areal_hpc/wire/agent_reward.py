"""Reward that an agent returns, with its parts, metrics and a note."""

import math
import numbers
import re
from collections.abc import Mapping

import numpy as np
from msgspec import Struct
from msgspec.structs import force_setattr

from areal_hpc.errors import InvalidRewardError, escape_surrogates

MAX_REWARD = float(np.finfo(np.float32).max)
"""Rewards are stored as 32-bit floats."""
MAX_NAMED_NUMBERS = 64
"""Limit on the parts of one reward, and on its metrics: each becomes a curve."""
MAX_NAME_CHARS = 64
MAX_NOTE_CHARS = 4000
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")


class Reward(Struct, frozen=True, omit_defaults=True):
    """Reward of an episode or of one reply, with its parts.

    Only `value` is trained on. `parts` and `metrics` become curves of the run; `note` is shown with
    the conversation.

    Raises:
        InvalidRewardError: (a ValueError) A number is missing or not finite, there are more than 64
            parts or metrics, a name has other characters than letters, digits and `_./-`, or the
            note or the answer is longer than 4,000 characters.
    """

    value: float
    parts: dict[str, float] = {}
    """Terms of the value by name: `{"format": 0.2, "correct": 0.8}`."""
    metrics: dict[str, float] = {}
    """Further numbers of the episode, by name: `{"tool_errors": 2}`."""
    note: str = ""
    """Remark for readers of the conversation."""
    answer: str = ""
    """Final answer of the episode, in a form in which equal answers are equal texts: `cons@k` of an
    evaluation set takes the most frequent one."""

    def __post_init__(self) -> None:
        force_setattr(self, "value", parse_reward_number(self.value))
        for field in ("parts", "metrics"):
            force_setattr(self, field, _parse_named_numbers(getattr(self, field), field))
        for name in ("note", "answer"):
            force_setattr(self, name, _parse_text(getattr(self, name), name))

    @classmethod
    def from_weighted_parts(
        cls,
        parts: Mapping[str, float],
        weights: Mapping[str, float],
        *,
        metrics: Mapping[str, float] | None = None,
        note: str = "",
        answer: str = "",
    ) -> "Reward":
        """Return the weighted sum of parts: `{"correct": 1, "style": 0.4}` with .8 and .2 is .88.

        `parts` of the reward are the weighted ones, `metrics` have the parts without weights.

        Raises:
            InvalidRewardError: A part has no weight, or a weight no part; or `Reward` refuses them.
        """
        if parts.keys() != weights.keys():
            raise InvalidRewardError(
                f"expected a weight for each part, got parts {sorted(parts)} and weights "
                f"{sorted(weights)}"
            )
        weighted = {name: weights[name] * part for name, part in parts.items()}
        return cls(
            sum(weighted.values()),
            parts=weighted,
            metrics={**parts, **(metrics or {})},
            note=note,
            answer=answer,
        )


def parse_reward_number(raw_number: object, field_name: str = "reward") -> float:
    """Return a number, or an array of one number, as a finite float; errors name `field_name`."""
    if isinstance(raw_number, np.ndarray | np.generic) and raw_number.size == 1:
        raw_number = raw_number.item()
    if not isinstance(raw_number, numbers.Real):
        raise InvalidRewardError(
            f"{field_name}: expected a finite float, got {_format_wrong_value(raw_number)}"
        )
    try:
        value = float(raw_number)
    except OverflowError:
        value = math.inf
    if not abs(value) <= MAX_REWARD:
        raise InvalidRewardError(
            f"{field_name}: expected a finite 32-bit float, got {raw_number!r:.200}"
        )
    return value


def _parse_named_numbers(values_by_name: object, field: str) -> dict[str, float]:
    if not isinstance(values_by_name, Mapping):
        raise InvalidRewardError(
            f"{field}: expected numbers by name, got {_format_wrong_value(values_by_name)}"
        )
    if len(values_by_name) > MAX_NAMED_NUMBERS:
        raise InvalidRewardError(
            f"{field}: expected at most {MAX_NAMED_NUMBERS} names, got {len(values_by_name)}"
        )
    for name in values_by_name:
        if not (
            isinstance(name, str) and len(name) <= MAX_NAME_CHARS and _NAME_PATTERN.fullmatch(name)
        ):
            raise InvalidRewardError(
                f"{field}: expected names of at most {MAX_NAME_CHARS} letters, digits and _./-, "
                f"got {_format_wrong_value(name)}"
            )
    return {
        name: parse_reward_number(number, f"{field}.{name}")
        for name, number in values_by_name.items()
    }


def _parse_text(text: object, field: str) -> str:
    expected = f"{field}: expected a text of at most {MAX_NOTE_CHARS} characters"
    if not isinstance(text, str):
        raise InvalidRewardError(f"{expected}, got {_format_wrong_value(text)}")
    if len(text) > MAX_NOTE_CHARS:
        raise InvalidRewardError(f"{expected}, got {len(text)}")
    return escape_surrogates(text)


def _format_wrong_value(value: object) -> str:
    return f"{value!r:.200} ({type(value).__name__})"
