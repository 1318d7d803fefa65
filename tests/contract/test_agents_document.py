"""docs/agents.md shows code that is run."""

import re

from tests.support.agents_table import DOCUMENT
from tests.support.environments import CHECKOUT


def squeeze(code: str) -> str:
    """Without blanks and without what a slow machine has longer for."""
    return re.sub(r"scaled\((\d+)\)", r"\1", "".join(code.split()))


SOURCES = [
    squeeze(path.read_text())
    for folder in ("examples", "tests/contract", "tests/integration")
    for path in sorted((CHECKOUT / folder).rglob("*.py"))
]


def test_every_piece_of_python_is_part_of_a_file_that_tests_run() -> None:
    pieces = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
    assert len(pieces) > 5
    for piece in pieces:
        for part in piece.strip("\n").split("\n...\n"):
            assert any(squeeze(part) in source for source in SOURCES), part
