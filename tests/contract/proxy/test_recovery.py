"""kill -9, restarts, a ledger that is away: no interaction and no ticket is lost or doubled."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from areal_hpc.shards.index import read_index
from areal_hpc.shards.reader import ShardReader
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import ExportSettings, FinishTicketRequest
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script
from tests.support.waiting import wait_for

REF = TicketRef(7, 2)


def finish(stage: Stage, *session_ids: str, ref: TicketRef = REF) -> int:
    """Rows of the ticket."""
    reply = stage.post("/rl/finish_ticket", FinishTicketRequest(ref, list(session_ids)))
    assert reply.status_code == 200, reply.text
    return int(reply.json()["rows"])


def finish_ticket(stage: Stage, *texts: str, ref: TicketRef = REF) -> None:
    """A ticket of one session, that says something."""
    session_id, key = stage.open_session(ref)
    for text in texts or ("hi",):
        assert stage.ask(key, text, logprobs=True).status_code == 200
    stage.finish_session(key, 1.0)
    finish(stage, session_id, ref=ref)


def restart(stage: Stage) -> None:
    """kill -9, and another proxy."""
    stage.kill_proxy()
    stage.start_proxy()


def seal(stage: Stage) -> int:
    """Tickets that were sealed."""
    reply = stage.post("/rl/seal", {})
    assert reply.status_code == 200, reply.text
    return int(reply.json()["tickets"])


def test_a_finished_ticket_is_sealed_as_it_was_said_and_settled(own_stage: Stage) -> None:
    stage = own_stage
    stage.sglang.script = lambda request: Script(
        "hello world", versions=[("3.1", 0, 2), ("3.2", 2, 5)]
    )
    sessions = [stage.open_session(REF, episode=episode) for episode in range(2)]
    stray, _ = stage.open_session(REF, episode=1)
    for reward, (_, key) in enumerate(sessions):
        assert stage.ask(key, "hi", temperature=0.5).status_code == 200
        stage.finish_session(key, float(reward))
    assert finish(stage, *(session_id for session_id, _ in sessions)) == 2
    assert seal(stage) == 1
    (settled,) = stage.ledger.settled
    assert (settled.ref, settled.rows, settled.rewards) == (REF, [0, 1], [0.0, 1.0])
    rows = ShardReader(stage.paths.shards_dir / settled.shard).read_rows(settled.rows)
    prompt = stage.sglang.requests[0]["input_ids"]
    for episode, row in enumerate(rows):
        assert row.input_ids_T.tolist()[: len(prompt)] == prompt
        assert row.loss_mask_T.tolist() == [0] * len(prompt) + [1] * 5
        versions = [-1] * len(prompt) + [3 << 32 | 1] * 2 + [3 << 32 | 2] * 3
        assert row.versions_T.tolist() == versions
        logprobs = [-0.5 - 0.001 * i for i in range(5)]
        assert np.allclose(row.logprobs_T[len(prompt) :], logprobs)
        assert (row.ticket_id, row.attempt, row.episode) == (7, 2, episode)
        assert row.temperature == 0.5
    assert stray not in stage.http.get(f"{stage.url}/healthz").text


def test_a_session_survives_kill_9_and_its_ticket_is_sealed_once(own_stage: Stage) -> None:
    stage = own_stage
    session_id, key = stage.open_session(REF)
    with stage.client(key) as client:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        first = client.chat.completions.create(model="m", messages=messages)
        before = stage.url
        stage.kill_proxy()
        messages += [first.choices[0].message, {"role": "user", "content": "again"}]
        with ThreadPoolExecutor(1) as agent:
            second = agent.submit(client.chat.completions.create, model="m", messages=messages)
            time.sleep(0.3)
            stage.start_proxy()
            assert second.result(60).choices[0].message.content == "hello world"
    assert stage.url == before
    first_ids, second_ids = (request["input_ids"] for request in stage.sglang.requests)
    assert second_ids[: len(first_ids)] == first_ids
    stage.finish_session(key, 1.0)
    assert finish(stage, session_id) == 1
    restart(stage)
    assert finish(stage, session_id) == 1
    assert seal(stage) == 1
    assert seal(stage) == 0
    restart(stage)
    assert seal(stage) == 0
    (settled,) = stage.ledger.settled
    (shard,) = read_index(stage.paths.index_dir)
    assert (shard.rows, settled.rewards) == (1, [1.0])
    (row,) = ShardReader(stage.paths.shards_dir / shard.file).read_rows([0])
    assert row.input_ids_T.tolist()[: len(second_ids)] == second_ids
    assert row.loss_mask_T.sum() == 10


def test_rows_are_made_as_the_session_was_opened_even_after_a_crash(own_stage: Stage) -> None:
    stage = own_stage
    export = ExportSettings("individual", turn_discount=0.5)
    session_id, key = stage.open_session(REF, export=export)
    first = stage.ask(key, "hi").json()["choices"][0]["message"]
    history = [{"role": "user", "content": "hi"}, first, {"role": "user", "content": "again"}]
    stage.chat(key, history)
    stage.ask(key, "I am another agent")
    stage.finish_session(key, 1.0)
    restart(stage)
    assert finish(stage, session_id) == 3
    assert seal(stage) == 1
    assert stage.ledger.settled[0].rewards == [0.25, 0.5, 1.0]
    (shard,) = read_index(stage.paths.index_dir)
    rows = ShardReader(stage.paths.shards_dir / shard.file).read_rows([0, 1, 2])
    assert [row.loss_mask_T.sum() for row in rows] == [5, 5, 5]
    assert [row.reward for row in rows] == [0.25, 0.5, 1.0]


def test_a_ticket_sealed_just_before_the_crash_is_found_in_the_index(own_stage: Stage) -> None:
    stage = own_stage
    finish_ticket(stage)
    (journal,) = stage.journal_dir.glob("*/journal")
    unsealed = journal.read_bytes()
    assert seal(stage) == 1
    stage.kill_proxy()
    journal.write_bytes(unsealed)  # as if it died before it could note the shard
    stage.start_proxy()
    wait_for(lambda: len(stage.ledger.settled) == 2)
    assert stage.ledger.settled[0] == stage.ledger.settled[1]
    assert len(read_index(stage.paths.index_dir)) == 1


def test_sigterm_seals_what_is_finished_waits_for_no_reply_and_keeps_an_unfinished_runs_journal(
    own_stage: Stage,
) -> None:
    stage = own_stage
    finish_ticket(stage)
    stage.sglang.script = lambda request: Script(gate=threading.Event())
    _, busy = stage.open_session(TicketRef(8, 0))
    threading.Thread(target=_ask_in_vain, args=(stage, busy), daemon=True).start()
    wait_for(lambda: len(stage.sglang.requests) == 2)
    stage.stop_proxy()  # the reply would never come
    assert [ticket.ref for ticket in stage.ledger.settled] == [REF]
    assert list(stage.journal_dir.glob("*/journal"))
    stage.start_proxy()
    stage.paths.finished_marker.touch()
    stage.stop_proxy()
    assert list(stage.journal_dir.iterdir()) == []


def _ask_in_vain(stage: Stage, key: str) -> None:
    try:
        stage.ask(key, "hi")
    except Exception:
        return


@pytest.mark.parametrize(
    "own_stage",
    [{"shards": {"seal_after_s": 0.3}}, {"shards": {"target_bytes": 4096}}],
    indirect=True,
    ids=["by age", "by bytes"],
)
def test_tickets_are_sealed_without_being_asked(own_stage: Stage) -> None:
    finish_ticket(own_stage, "hello world " * 100)
    wait_for(lambda: own_stage.ledger.settled)


def test_the_journal_forgets_what_is_settled(own_stage: Stage) -> None:
    stage = own_stage
    open_id, open_key = stage.open_session(TicketRef(99, 0))
    stage.ask(open_key, "remember me")
    (journal,) = stage.journal_dir.glob("*/journal")
    largest = 0
    for number in range(45):
        texts = ["x " * 990 + str(number), "é" * 900] * 4
        finish_ticket(stage, *texts, ref=TicketRef(number, 0))
        seal(stage)
        largest = max(largest, journal.stat().st_size)
    assert largest > 900_000
    assert journal.stat().st_size < 500_000
    restart(stage)
    stage.finish_session(open_key, 1.0)
    assert finish(stage, open_id, ref=TicketRef(99, 0)) == 1


def test_evaluation_sessions_are_not_journaled(stage: Stage) -> None:
    session_id, key = stage.open_session(TicketRef(0, 0, eval_step=4))
    assert stage.ask(key, "hi").status_code == 200
    assert stage.post("/rl/set_reward", {"reward": 0.5}, key).status_code == 200
    ended = stage.post("/rl/end_session", {}, key).json()
    assert (ended["reward"], ended["interaction_count"]) == (0.5, 1)
    (journal,) = stage.journal_dir.glob("*/journal")
    assert session_id.encode() not in journal.read_bytes()


def test_tickets_are_finished_only_when_they_can_be_trained_on(stage: Stage) -> None:
    first, key = stage.open_session(REF)
    other, _ = stage.open_session(TicketRef(8, 0))

    def status(*ids: str) -> int:
        return stage.post("/rl/finish_ticket", FinishTicketRequest(REF, list(ids))).status_code

    stage.ask(key, "hi")
    assert [status(), status("nobody"), status(other), status(first)] == [400, 404, 409, 409]
    assert stage.post("/rl/end_session", {}, key).status_code == 200
    assert status(first) == 409  # no reward
    again, key = stage.open_session(REF)
    assert stage.post("/rl/set_reward", {"reward": 1.0}, key).status_code == 400  # nothing said
    reply = stage.ask(key, "hi").json()
    body = {"reward": 2.0, "interaction_id": reply["id"]}
    assert stage.post("/rl/set_reward", {**body, "interaction_id": "no"}, key).status_code == 400
    assert stage.post("/rl/set_reward", body, key).json() == {"interaction_id": reply["id"]}
    stage.post("/rl/end_session", {}, key)
    assert stage.ask(key, "more").status_code == 403
    assert stage.post("/rl/set_reward", body, key).status_code == 403
    assert finish(stage, again) == 1
    assert stage.post("/rl/end_session", {}, key).status_code == 200


def test_a_filtered_ticket_is_forgotten_and_never_sealed(stage: Stage) -> None:
    filtered, kept = TicketRef(72, 0), TicketRef(73, 0)
    _, key = stage.open_session(filtered)
    stage.ask(key, "hi")
    other, other_key = stage.open_session(kept)
    stage.ask(other_key, "hi")
    discard = FinishTicketRequest(filtered, [], discard=True)
    for _ in range(2):  # repeating it is harmless
        assert stage.post("/rl/finish_ticket", discard).json() == {"rows": 0}
    assert stage.ask(key, "more").status_code == 401
    restart(stage)
    assert stage.ask(key, "more").status_code == 401
    stage.finish_session(other_key, 1.0)
    assert finish(stage, other, ref=kept) == 1
    refused = stage.post("/rl/finish_ticket", FinishTicketRequest(kept, [], discard=True))
    assert refused.status_code == 409
