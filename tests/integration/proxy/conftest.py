"""Shared proxy of this folder with SGLang's parsers, which import SGLang."""

from collections.abc import Iterator

import pytest

from areal_hpc.jobs.config import get_interpreter
from tests.support.chatml import REASONING_CHATML, write_model_dir
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Start a scripted model with the format of Qwen3, and SGLang's real parsers."""
    root = tmp_path_factory.mktemp("parsing")
    stage = Stage(
        root,
        model_dir=write_model_dir(root / "model", template=REASONING_CHATML),
        tool_call_parser="qwen25",
        reasoning_parser="qwen3",
        serve_python=get_interpreter("serve", "auto"),
    )
    stage.http.timeout = scaled(120.0)  # the parsers import SGLang first
    yield stage
    stage.close()
