"""Extraction of an answer from a reply: boxed, tagged or fenced."""

import re
from collections.abc import Callable

_MINUS_SIGNS = dict.fromkeys(map(ord, "\u2212\ufe63\uff0d"), "-")
"""What typography writes in the place of the minus sign of ASCII."""
_ANSWER_START_PATTERN, _ANSWER_END_PATTERN = (
    re.compile(tag, re.IGNORECASE) for tag in ("<answer>", "</answer>")
)
_FENCE_START_PATTERN = re.compile(
    r"(?:^[^\S\n]*```(?P<label>[^`\n]*)|```(?:python3?|py)?[^\S\n]*)\n",
    re.IGNORECASE | re.MULTILINE,
)
"""A block of another language has to begin its line: three backticks within one are often none."""
_FENCE_END_PATTERN = re.compile("```")
_PYTHON_LABELS = ("", "python", "python3", "py")


def replace_typographic_minus(text: str) -> str:
    """The text with the minus sign of ASCII in place of those of typography."""
    return text.translate(_MINUS_SIGNS)


def extract_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds, braces within it included; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return None


def extract_tagged(text: str) -> str | None:
    """What the last `<answer>...</answer>` holds; None without one."""
    found = _extract_last_between(_ANSWER_START_PATTERN, _ANSWER_END_PATTERN, text)
    return None if found is None else found.strip()


def extract_code(text: str) -> str | None:
    """The last fenced block that is labelled Python, or not at all; None without one."""
    return _extract_last_between(_FENCE_START_PATTERN, _FENCE_END_PATTERN, text, _is_python)


def _is_python(opening: re.Match[str]) -> bool:
    label, *_ = (opening["label"] or "").lower().split() or ("",)
    return label in _PYTHON_LABELS


def _extract_last_between(
    opening_pattern: re.Pattern[str],
    closing_pattern: re.Pattern[str],
    text: str,
    is_wanted: Callable[[re.Match[str]], bool] = lambda opening: True,
) -> str | None:
    """What the last pair encloses; a pair reaches to the first end, and pairs do not overlap.

    Two searches, because one expression for the pair looks for its end anew from every opening.
    """
    found, place = None, 0
    while (begin := opening_pattern.search(text, place)) and (
        end := closing_pattern.search(text, begin.end())
    ):
        place = end.end()
        if is_wanted(begin):
            found = text[begin.end() : end.start()]
    return found
