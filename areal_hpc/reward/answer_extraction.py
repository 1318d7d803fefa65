"""Extraction of the answer from a reply: boxed, tagged, or in a fenced block of code."""

import re
from collections.abc import Callable

_MINUS_SIGNS = dict.fromkeys(map(ord, "\u2212\ufe63\uff0d"), "-")
"""Typographic minus signs, mapped to ASCII's."""
_ANSWER_START_PATTERN, _ANSWER_END_PATTERN = (
    re.compile(tag, re.IGNORECASE) for tag in ("<answer>", "</answer>")
)
_FENCE_START_PATTERN = re.compile(
    r"(?:^[^\S\n]*```(?P<label>[^`\n]*)|```(?:python3?|py)?[^\S\n]*)\n",
    re.IGNORECASE | re.MULTILINE,
)
"""Start of a fenced block; one of another language than Python must begin its line."""
_FENCE_END_PATTERN = re.compile("```")
_PYTHON_LABELS = ("", "python", "python3", "py")


def replace_typographic_minus(text: str) -> str:
    """Replace typographic minus signs by ASCII's."""
    return text.translate(_MINUS_SIGNS)


def extract_boxed(text: str) -> str | None:
    r"""Extract the content of the last `\boxed{...}`, with nested braces; None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for index in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin:index]
    return None


def extract_tagged(text: str) -> str | None:
    """Extract the content of the last `<answer>...</answer>`; None if there is none."""
    content = _extract_last_between(_ANSWER_START_PATTERN, _ANSWER_END_PATTERN, text)
    return None if content is None else content.strip()


def extract_code(text: str) -> str | None:
    """Extract the last fenced block with Python's label or without one; None if there is none."""
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
    """Extract the text in the last pair; a pair ends at the first closing, and none overlap.

    A single regular expression for the pair would search for the end again from each opening.
    """
    content, position = None, 0
    while (begin := opening_pattern.search(text, position)) and (
        end := closing_pattern.search(text, begin.end())
    ):
        position = end.end()
        if is_wanted(begin):
            content = text[begin.end() : end.start()]
    return content
