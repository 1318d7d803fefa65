"""The proxy asks once for the experts that tokens visited, and seals them with the row."""

import json
from collections.abc import Iterator

import numpy as np
import pytest

from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.trajectory import MixtureShape, TrajectoryRow
from tests.support.chatml import write_model_dir
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script, make_routes

MIXTURE = MixtureShape(layers=3, per_token=2, experts=8)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("stage")
    model_dir = write_model_dir(root / "model")
    config = json.loads((model_dir / "config.json").read_text())
    sizes = {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}
    (model_dir / "config.json").write_text(json.dumps(config | sizes))
    stage = Stage(root, model_dir=model_dir)
    stage.sglang.mixture = MIXTURE
    stage.sglang.incremental = True
    yield stage
    stage.close()


def play(stage: Stage, ref: TicketRef, *questions: str, stream: bool = False) -> str:
    """Ask one question after another, in one conversation."""
    session_id, key = stage.open_session(ref)
    messages = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        body = {"model": "m", "messages": messages, "stream": stream}
        reply = stage.post("/v1/chat/completions", body, key)
        assert reply.status_code == 200, reply.text
        messages.append({"role": "assistant", "content": "hello world"})
    stage.finish_session(key, 1.0)
    assert stage.finish_ticket(ref, session_id) == 1
    return session_id


def check_routes(row: TrajectoryRow) -> None:
    assert row.routes_TLK is not None
    assert row.routes_TLK.dtype == np.uint8
    assert np.array_equal(row.routes_TLK[:-1], make_routes(row.input_ids_T.tolist(), MIXTURE)[:-1])
    assert (row.routes_TLK[-1] == 255).all()


@pytest.mark.parametrize("stream", [False, True])
def test_each_turn_tells_the_routes_of_what_is_new(stage: Stage, stream: bool) -> None:
    ref = TicketRef(70 + stream, 0)
    stage.sglang.requests.clear()
    play(stage, ref, "one?", "and two?", stream=stream)
    first, second = stage.sglang.requests
    assert (first["return_routed_experts"], first["routed_experts_start_len"]) == (True, 0)
    output_tokens = len(stage.sglang._payload(first, Script())["output_ids"])
    assert second["routed_experts_start_len"] == len(first["input_ids"]) + output_tokens - 1
    assert stage.seal() == 1
    (row,) = stage.sealed_rows(ref)
    check_routes(row)


def test_unsound_routes_leave_the_choice_to_the_trainer(stage: Stage) -> None:
    odd = [MixtureShape(layers=2, per_token=2, experts=8), MixtureShape(3, 2, experts=99)]
    for number, stage.sglang.mixture in enumerate(odd):
        ref = TicketRef(80 + number, 0)
        play(stage, ref, "a question with more tokens than eight?")
        assert stage.seal() == 1
        (row,) = stage.sealed_rows(ref)
        assert row.routes_TLK is None
    stage.sglang.mixture = MIXTURE
    assert "came without sound routes" in stage.log


def test_nobody_asks_for_routes_of_what_is_not_trained(stage: Stage) -> None:
    stage.sglang.requests.clear()
    play(stage, TicketRef(3, 1_000_001, eval_step=4), "one?")
    assert "return_routed_experts" not in stage.sglang.requests[-1]


def test_a_restarted_proxy_seals_them_from_its_journal(stage: Stage) -> None:
    ref = TicketRef(90, 0)
    play(stage, ref, "one?", "and two?")
    stage.kill_proxy()
    stage.start_proxy()
    assert stage.seal() == 1
    (row,) = stage.sealed_rows(ref)
    check_routes(row)
