"""Where in a text the answer is."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_FENCED = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def boxed(text: str) -> str | None:
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


def tagged(text: str) -> str | None:
    """What the last `<answer>...</answer>` holds; None without one."""
    found = _TAGGED.findall(text)
    return str(found[-1]).strip() if found else None


def fenced(text: str) -> str | None:
    """The last fenced block of Python; None without one."""
    found = _FENCED.findall(text)
    return str(found[-1]) if found else None
