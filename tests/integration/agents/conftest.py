"""One real SGLang and one proxy for this folder, gone when the last of its tests is done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from areal_hpc.cluster.submit import interpreter_of
from areal_hpc.launch.tiny_model import TURN_END, make_tiny_model
from tests.contract.proxy.proxy_stage import Stage
from tests.integration.agents.theatre import Theatre
from tests.integration.sglang_server import serving
from tests.unit.session.chatml import TRAINING_TEXT

FOLDER = Path(__file__).parent
CONTEXT_TOKENS = 4096
VERSION = "1.0"
_open = ExitStack()
_theatres: list[Theatre] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep this folder's tests together: elsewhere another SGLang may run, two do not fit."""
    items.sort(key=lambda item: FOLDER in item.path.parents)
    for item in items:
        if FOLDER in item.path.parents:  # one of them waits for SGLang to start
            item.add_marker(pytest.mark.timeout(240))


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
    stage = Stage(mktemp("stage"), model_dir=model_dir, context_tokens=CONTEXT_TOKENS)
    _open.callback(stage.close)
    stage.stop_proxy()
    formats = {"tool_call_parser": "qwen25", "serve_python": interpreter_of("serve", "auto")}
    stage.configure({**stage.config, **formats})
    stage.start_proxy()
    stage.route_to(url)
    return Theatre(stage, url)


def make_talking_model(model_dir: Path) -> None:
    """A random model that writes text, and ends it at every tenth token but never before the first.

    Left alone one ends a reply at every four hundredth token, and most of its tokens are no text:
    now and then a reply reached its limit, which the Agents SDK takes for an error, or was empty,
    which CAMEL takes for none, or a grammar that allows any white space got nothing else. So two
    numbers of the residual stream are left alone by the layers and are the same after every token
    but one; the output layer reads the first for the turn's end and the second for what is no text.
    """
    make_tiny_model(
        model_dir, TRAINING_TEXT * 20, seed=5, tie=False, max_position_embeddings=CONTEXT_TOKENS
    )
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    turn_end, before_replies = tokenizer.token_to_id(TURN_END), tokenizer.encode("\n").ids[0]
    words = [tokenizer.decode([token]).strip() for token in range(tokenizer.get_vocab_size())]
    no_text = [not (word.isascii() and word.isprintable() and word) for word in words]
    weights = load_file(model_dir / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[:2] = 0.0
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding[:, :2] = 1.0
    embedding[before_replies, 0] = -0.5
    head[:, :2] = 1.0
    head[no_text, 1] = -20.0
    head[turn_end, :2] = 2.2, 1.0
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
