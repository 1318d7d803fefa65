"""One real SGLang on CPU with a tiny Qwen3 and a real proxy in front of it; SGLang's parsers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_hpc.jobs.config import get_interpreter
from areal_hpc.launch.tiny_model import make_tiny_model
from tests.support.chatml import REASONING_CHATML, TRAINING_TEXT, write_model_dir
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.sglang_server import serving

VERSION = "1.0"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(path, TRAINING_TEXT * 20, seed=5)
    return path


@pytest.fixture(scope="module")
def sglang_url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log_path = tmp_path_factory.mktemp("sglang") / "log"
    with serving(model_dir, log_path, "--weight-version", VERSION) as url:
        yield url


@pytest.fixture(scope="module")
def stage(
    model_dir: Path, sglang_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    python = get_interpreter("serve", "auto")
    folder = tmp_path_factory.mktemp("stage")
    stage = Stage(
        folder,
        model_dir=model_dir,
        context_tokens=1024,
        tool_call_parser="qwen25",
        serve_python=python,
    )
    stage.route_to(sglang_url)
    yield stage
    stage.close()


@pytest.fixture(scope="session")
def parsing_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A scripted model whose format is that of Qwen3, and SGLang's real parsers."""
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
