"""The code blocks of AReaL's guides, as tests/documents holds them byte for byte."""

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "documents"
_FENCE = re.compile(r"^([ \t]*)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_PROSE = re.compile(r"[A-Z]|\s*\d+\.\s|\s*•")
"""How a paragraph of an unfenced page begins that is no code."""
_COMMAND = re.compile(r"^(pip|python3?|export|workflow=)", re.MULTILINE)
_SETTING = re.compile(r"^(# .*\n)*\w+:( |$)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One code block."""

    document: str
    number: int
    """Counted from 1 within its document."""
    language: str
    """`python`, `yaml`, `command` or `drawing`."""
    text: str

    @property
    def key(self) -> str:
        return f"{self.document}:{self.number}"

    @property
    def beginning(self) -> str:
        """Its first line that is no comment."""
        lines = [line.strip() for line in self.text.splitlines()]
        return next(line for line in lines if line and not line.startswith("#"))


def blocks() -> list[Block]:
    """All blocks of all documents, in order."""
    found = []
    for path in sorted(FOLDER.glob("*.txt")):
        text = path.read_text()
        pieces = fenced(text) if "```" in text else unfenced(text)
        found += [
            Block(path.stem, number, language_of(piece), piece)
            for number, piece in enumerate(pieces, 1)
        ]
    return found


def fenced(text: str) -> list[str]:
    """What stands between fences, without their indentation."""
    return [
        "".join(line.removeprefix(match[1]) for line in match[3].splitlines(keepends=True))
        for match in _FENCE.finditer(text)
    ]


def unfenced(text: str) -> list[str]:
    """Runs of paragraphs that do not begin as prose does."""
    found: list[list[str]] = [[]]
    for paragraph in re.split(r"\n[ \t]*\n", text):
        is_heading = paragraph.rstrip().endswith("#") and "\n" not in paragraph.strip()
        if _PROSE.match(paragraph) or is_heading:
            found.append([])
        elif paragraph.strip():
            found[-1].append(paragraph)
    return ["\n\n".join(run) + "\n" for run in found if run]


def language_of(text: str) -> str:
    """What a block is written in."""
    if "┌" in text:
        return "drawing"
    if _COMMAND.search(text):
        return "command"
    return "yaml" if _SETTING.match(text) else "python"
