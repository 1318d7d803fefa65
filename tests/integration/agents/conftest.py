"""Shared SGLang and proxy of this folder, whose tests run on one worker."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from areal_hpc.jobs.config import get_interpreter
from tests.integration.agents.theatre import Theatre
from tests.support.chatml import CONTEXT_TOKENS, make_talking_model
from tests.support.proxy_stage import Stage
from tests.support.sglang_server import serving


@pytest.fixture(scope="session")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theatre]:
    folder = tmp_path_factory.mktemp("theatre")
    make_talking_model(folder / "model")
    sizes = {"context_tokens": CONTEXT_TOKENS}
    config: dict[str, Any] = {"tool_call_parser": "qwen25", **sizes}
    config["serve_python"] = get_interpreter("serve", "auto")
    with (
        serving(folder / "model", folder / "log", "--weight-version", "1.0", **sizes) as url,
        closing(Stage(folder, model_dir=folder / "model", **config)) as stage,
        closing(Theatre(stage, url)) as theatre,
    ):
        stage.route_to(url)
        yield theatre
