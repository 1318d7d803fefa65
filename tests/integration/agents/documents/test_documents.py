"""Every Python block of AReaL's guides that stands alone, on the real stack."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.integration.agents.theatre import Theatre
from tests.support.document_scenes import SCENES
from tests.support.documents import blocks
from tests.support.environments import CHECKOUT, python_of
from tests.support.scripted_sglang import CELL

FIRST_TICKETS = {"agents": 100_000, "camel": 101_000, "frameworks": 102_000}
"""By environment, away from those of the folder above. They decide what the model samples, so
they must not depend on the order of tests."""
_reports: dict[str, dict[str, str]] = {}


def report_of(environment: str, theatre: Theatre) -> dict[str, str]:
    """How the blocks of an environment went; all of them share one process."""
    if environment not in _reports:
        _reports[environment] = performed(environment, theatre)
    return _reports[environment]


def performed(environment: str, theatre: Theatre) -> dict[str, str]:
    parts = [
        {
            "key": block.key,
            "before": scene.before,
            "text": scene.text_of(block),
            "after": scene.after,
        }
        for block in blocks()
        if (scene := SCENES.get(block.key)) and scene.environment == environment
    ]
    order = {
        "run_dir": str(theatre.stage.layout.root),
        "cell": CELL,
        "admin_key": theatre.stage.admin_key,
        "engine": theatre.url,
        "model_dir": str(theatre.stage.model_dir),
        "first_ticket": FIRST_TICKETS[environment],
        "parts": parts,
    }
    report = theatre.stage.layout.root / f"documents_{environment}.json"
    done = subprocess.run(
        [python_of(environment), Path(__file__).with_name("perform.py"), report],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        input=msgspec.json.encode(order),
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(report.read_bytes(), type=dict[str, str])


@pytest.mark.timeout(500)  # one of them waits for SGLang and for every block of an environment
@pytest.mark.parametrize("key", sorted(SCENES))
def test_the_block_runs(key: str, theatre: Theatre) -> None:
    assert report_of(SCENES[key].environment, theatre)[key] == ""
