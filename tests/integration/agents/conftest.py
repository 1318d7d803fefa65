"""One real SGLang and one proxy for this folder, gone when the last of its tests is done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from areal_hpc.jobs.environment import get_interpreter
from tests.integration.agents.theatre import Theatre
from tests.integration.sglang_server import serving
from tests.support.proxy_stage import Stage
from tests.support.talking_model import CONTEXT_TOKENS, make_talking_model

FOLDER = Path(__file__).parent
VERSION = "1.0"
_open = ExitStack()
_theatres: list[Theatre] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep this folder's tests together: elsewhere another SGLang may run, two do not fit."""
    items.sort(key=lambda item: FOLDER in item.path.parents)


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Close the theatre after the folder's last test."""
    if nextitem is None or FOLDER not in nextitem.path.parents:
        _theatres.clear()
        _open.close()


@pytest.fixture
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Theatre:
    if not _theatres:
        _theatres.append(_opened(tmp_path_factory.mktemp))
    return _theatres[0]


def _opened(mktemp: Callable[[str], Path]) -> Theatre:
    model_dir = mktemp("tiny") / "model"
    make_talking_model(model_dir)
    log_path = mktemp("sglang") / "log"
    url = _open.enter_context(
        serving(model_dir, log_path, "--weight-version", VERSION, context_tokens=CONTEXT_TOKENS)
    )
    formats = {"tool_call_parser": "qwen25", "serve_python": get_interpreter("serve", "auto")}
    stage = Stage(mktemp("stage"), model_dir=model_dir, context_tokens=CONTEXT_TOKENS, **formats)
    _open.callback(stage.close)
    stage.route_to(url)
    return Theatre(stage, url)
