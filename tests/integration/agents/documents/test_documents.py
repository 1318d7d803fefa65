"""Every self-contained Python block of AReaL's guides runs on the real stack."""

from functools import cache
from pathlib import Path

import msgspec
import pytest

from tests.integration.agents.theatre import Theatre
from tests.support.documents import AGENTS, FRAMEWORKS, SCENES, blocks
from tests.support.thoroughness import choose

FIRST_TICKETS = {"main": 100_000, "camel": 101_000}
"""First tickets by environment, away from those of the folder above. Tickets decide the samples of
the model, so they must not depend on the order of tests."""


@cache
def performed(environment: str, theatre: Theatre) -> dict[str, str]:
    """Run the blocks of an environment in one process and return their failures."""
    scenes = [(block, SCENES[block.key]) for block in blocks() if block.key in SCENES]
    parts = [
        {"key": block.key, "before": page.before, "text": page.text_of(block), "after": page.after}
        for block, page in scenes
        if page.environment == environment
    ]
    order = {
        "engine": theatre.url,
        "model_dir": str(theatre.stage.model_dir),
        "first_ticket": FIRST_TICKETS[environment],
        "parts": parts,
    }
    report = theatre.report(environment, Path(__file__).with_name("perform.py"), order, 300)
    return msgspec.convert(report, dict[str, str])


@pytest.mark.timeout(500)  # one of them waits for SGLang and for every block of an environment
@pytest.mark.parametrize("key", choose(sorted(SCENES), *sorted(AGENTS | FRAMEWORKS)))
def test_the_block_runs(key: str, theatre: Theatre) -> None:
    assert performed(SCENES[key].environment, theatre)[key] == ""
