"""docs/agents.md names the versions that are tested, and shows code that is run."""

import re

from tests.support.agents_table import DOCUMENT, FRAMEWORKS
from tests.support.environments import CHECKOUT

SOURCES = [
    path.read_text()
    for folder in ("examples", "tests/contract", "tests/integration")
    for path in sorted((CHECKOUT / folder).rglob("*.py"))
]
RECIPES = [path.read_text() for path in sorted((CHECKOUT / "tests").rglob("*.yaml"))]


def test_every_framework_of_the_table_has_its_test() -> None:
    path = CHECKOUT / "tests" / "integration" / "agents" / "test_frameworks.py"
    tested = re.findall(r"^def (test_\w+)\(theatre", path.read_text(), re.M)
    of_frameworks = tuple(one.test for one in FRAMEWORKS)
    assert all(name.startswith(of_frameworks) for name in tested)
    assert all(any(name.startswith(one) for name in tested) for one in of_frameworks)


def test_every_piece_of_python_is_part_of_a_file_that_tests_run() -> None:
    pieces = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
    assert len(pieces) >= len(FRAMEWORKS)
    for piece in pieces:
        for part in piece.strip("\n").split("\n...\n"):
            assert any(part.strip("\n") in source for source in SOURCES), part
