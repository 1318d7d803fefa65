"""The ledger's HTTP service waits, refuses, stops, and drops or sets aside tickets for good."""

import time
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from areal_hpc.errors import HttpStatusError
from areal_hpc.rundir.files import claim_next_number
from areal_hpc.rundir.manifests import read_quarantine_files
from areal_hpc.rundir.rendezvous import derive_bearer_key, make_client_tls
from areal_hpc.wire.ledger import (
    BatchReply,
    BatchRequest,
    DropTicketRequest,
    IrregularTicketCounts,
    LeaseReply,
    LeaseRequest,
    LedgerStatus,
    SealedTicket,
    SettleShardsRequest,
    TicketRef,
)
from areal_hpc.wire.weight_version import WeightVersion
from tests.integration.ledger.ledger_process import LedgerProcess, StartLedger
from tests.support.commands import exit_code_of
from tests.support.deadlines import scaled
from tests.support.service_keys import OTHER_SERVICE_KEY

WAIT_S = scaled(50.0)
"""Time without news after which a wait ends."""
PROMPT_S = scaled(20.0)
"""Time within which a wait with news ends on any machine; on an idle one in 1-3 ms."""
RARE_SWEEPS = {"cell_timeout_s": 3000.0}
"""Sweeps wake waiting calls too, so they come every 100 s here, and the news alone wakes calls."""


@pytest.fixture
def ledger(start_ledger: StartLedger) -> LedgerProcess:
    return start_ledger(**RARE_SWEEPS)


@pytest.fixture(scope="module")
def idle_ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerProcess]:
    """Start a ledger for requests that change nothing."""
    with LedgerProcess(tmp_path_factory.mktemp("idle")) as process:
        yield process


def post(
    ledger: LedgerProcess, route: str, content: bytes, key: str | None = None
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {ledger.key if key is None else key}"}
    tls = make_client_tls(ledger.service_key)
    return httpx.post(
        f"{ledger.url}{route}", content=content, headers=headers, verify=tls, trust_env=False
    )


def test_a_waiting_driver_is_served_once_a_version_is_published(ledger: LedgerProcess) -> None:
    ledger.open_generation()
    ledger.form_batch(1)
    waiting = ledger.call_later("/lease", LeaseRequest("cell-0", 8, wait_s=WAIT_S), LeaseReply)
    time.sleep(0.1)
    assert not waiting.done(), "synchronous training must not run ahead of the published step"
    ledger.publish(1)
    assert len(waiting.result(PROMPT_S).grants) == 2


def test_a_waiting_trainer_is_served_once_its_batch_is_complete(ledger: LedgerProcess) -> None:
    ledger.open_generation()
    first, second = (ledger.seal([grant.ref]) for grant in ledger.grants())
    waiting = ledger.call_later("/batch", BatchRequest(1, 1, WAIT_S), BatchReply)
    ledger.settle(first)
    time.sleep(0.1)
    assert not waiting.done()
    ledger.settle(second)
    assert waiting.result(PROMPT_S).manifest is not None


def test_a_caller_that_hung_up_is_granted_nothing(ledger: LedgerProcess) -> None:
    ledger.open_generation()
    ledger.form_batch(1)
    ledger.begin("/lease", LeaseRequest("cell-0", 8, wait_s=WAIT_S)).close()
    ledger.catch_up()
    ledger.publish(1)
    assert ledger.status().leased == 0
    assert len(ledger.grants("cell-1")) == 2


def test_a_cell_is_asked_to_seal_once_only_a_seal_is_missing(ledger: LedgerProcess) -> None:
    ledger.open_generation()
    refs = [grant.ref for grant in ledger.grants()]
    assert not ledger.lease(held=refs[1:], finished=refs[:1]).seal_now
    assert not ledger.lease("cell-1").seal_now
    assert ledger.lease(finished=refs).seal_now
    assert not ledger.lease("cell-1").seal_now, "it has nothing to seal"
    ledger.settle(ledger.seal(refs))
    assert not ledger.lease(finished=refs).seal_now


def test_a_waiting_trainer_wakes_the_cell_that_can_seal(start_ledger: StartLedger) -> None:
    ledger = start_ledger(max_head_offpolicyness=1, **RARE_SWEEPS)
    ledger.open_generation()
    refs = [grant.ref for grant in ledger.grants(tickets=3)]
    request = LeaseRequest("cell-0", 0, finished=refs, wait_s=WAIT_S)
    cell = ledger.call_later("/lease", request, LeaseReply)
    time.sleep(0.1)
    assert not cell.done(), "nobody waits: the shard may still grow"
    trainer = ledger.call_later("/batch", BatchRequest(1, 1, WAIT_S), BatchReply)
    assert cell.result(PROMPT_S).seal_now
    ledger.settle(ledger.seal(refs))
    assert trainer.result(PROMPT_S).manifest is not None


def test_agents_that_only_fail_are_reported_to_the_trainer_at_once_and_not_again_after_a_restart(
    ledger: LedgerProcess,
) -> None:
    ledger.open_generation()
    waiting = ledger.call_later("/batch", BatchRequest(1, 1, WAIT_S), BatchReply)
    for _ in range(2):
        for grant in ledger.grants():
            ledger.drop(grant.ref, "ZeroDivisionError in solve()")
    trouble = waiting.result(PROMPT_S).trouble
    assert "4 tickets in a row" in trouble
    assert "ZeroDivisionError in solve()" in trouble
    ledger.restart(cell_timeout_s=scaled(1.5))  # it listens for a third of that
    assert ledger.batch(1).trouble == ""
    assert ledger.status().dropped == 4
    again = {grant.ref.ticket_id for grant in ledger.grants()}
    assert again.isdisjoint(range(4))


def test_a_held_out_task_whose_agent_fails_scores_zero(ledger: LedgerProcess) -> None:
    ledger.open_generation()
    ledger.evaluate(0, 1)
    evaluations = [g.ref for g in ledger.grants() if g.ref.eval_step == 0]
    ledger.drop(evaluations[0], "it raised")
    assert ledger.get_reward(0, 1) == 0.0
    assert b"it raised" in ledger.paths.evaluation(0).read_bytes()


@pytest.mark.parametrize(
    ("route", "body", "status", "words"),
    [
        ("/lease", b"{", 400, "expected LeaseRequest as JSON"),
        ("/lease", b'{"cell": "a"}', 400, "missing required field `capacity`"),
        ("/lease", b'{"cell": "a", "capacity": "x"}', 400, "Expected `int`, got `str`"),
        ("/lose", b"{}", 404, "/lease /batch"),
        ("/batch", b'{"generation": 1, "step": 1}', 409, "call /open_generation first"),
        ("/open_generation", b'{"generation": 7, "base_step": 0}', 400, "has taken generation 7"),
        ("/evaluate", b'{"generation": 1, "step": 0, "sets": {"valid": 6}}', 400, "5 of valid"),
        ("/evaluate", b'{"generation": 1, "step": 0, "sets": {"aime": 1}}', 400, "5 of valid"),
        ("/settle", b" " * (17 * 1024 * 1024), 413, "at most"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(
    idle_ledger: LedgerProcess, route: str, body: bytes, status: int, words: str
) -> None:
    answer = post(idle_ledger, route, body)
    assert answer.status_code == status
    assert words in answer.json()["error"]


def test_every_route_is_opened_by_the_ledgers_own_key_alone(idle_ledger: LedgerProcess) -> None:
    for key in (
        "wrong",
        idle_ledger.service_key.replace("\n", ""),
        derive_bearer_key(idle_ledger.service_key, "control-cell-0"),
        derive_bearer_key(OTHER_SERVICE_KEY, "ledger"),
    ):
        for route in ("/status", "/lease", "/no_such_route"):
            refused = post(idle_ledger, route, b"{}", key)
            assert refused.status_code == 401
            assert idle_ledger.key not in refused.text


@pytest.mark.parametrize("unknown", ["../s", "cell-9-000000.h5", "cell-0-000099.h5"])
def test_a_shard_counts_only_with_a_line_in_the_index(ledger: LedgerProcess, unknown: str) -> None:
    tickets = ledger.seal([grant.ref for grant in ledger.grants()])
    with pytest.raises(HttpStatusError, match="no line of that shard"):
        ledger.order("/settle", SettleShardsRequest("cell-0", [tickets[0].shard, unknown]))
    assert ledger.status().settled == 0, "a request is taken whole or not at all"
    ledger.settle(tickets)
    assert ledger.status().settled == 2


def test_steps_are_handed_out_in_order_and_status_counts_them(ledger: LedgerProcess) -> None:
    ledger.open_generation(4)
    with pytest.raises(HttpStatusError, match="0 of 3 were handed out"):
        ledger.batch(2, generation=4)
    with pytest.raises(HttpStatusError, match="step 1 does not exist"):
        ledger.publish(1, generation=4)
    refs = [grant.ref for grant in ledger.grants()]
    ledger.lease(held=refs[1:], finished=refs[:1])
    counted = LedgerStatus(generation=4, leased=1, finished=1, cells=1)
    assert ledger.status() == msgspec.structs.replace(counted, episodes_done=4, episodes_wanted=8)


def test_an_older_start_of_a_cell_holds_nothing_after_a_later_one(ledger: LedgerProcess) -> None:
    ledger.open_generation()
    first = [grant.ref for grant in ledger.lease(job_start=1).grants]
    assert len(first) == 2
    again = [grant.ref for grant in ledger.lease(job_start=2).grants]
    assert {ref.ticket_id for ref in again} == {ref.ticket_id for ref in first}
    with pytest.raises(HttpStatusError, match="restart 1 of cell-0 was replaced by restart 2"):
        ledger.lease(held=first, job_start=1)
    assert ledger.lease(held=again, job_start=2).grants == []
    assert ledger.status().leased == 2


def test_a_stop_signal_answers_those_who_wait_and_ends_the_process(ledger: LedgerProcess) -> None:
    waiting = ledger.begin("/batch", BatchRequest(0, 1, WAIT_S))
    ledger.process.terminate()
    answer = waiting.getresponse().read()
    assert msgspec.json.decode(answer, type=BatchReply).manifest is None
    waiting.close()
    ledger.process.join(PROMPT_S)
    assert ledger.process.exitcode == 0


@pytest.fixture
def dropping_ledger(start_ledger: StartLedger) -> LedgerProcess:
    started = start_ledger(max_head_offpolicyness=1, stale_groups="drop")
    started.open_generation()
    return started


def sealed(dropping_ledger: LedgerProcess, refs: list[TicketRef], step: int) -> list[SealedTicket]:
    tickets = dropping_ledger.seal(refs, oldest_version=WeightVersion(1, step).packed)
    dropping_ledger.settle(tickets)
    return tickets


def test_a_stale_ticket_is_dropped_for_good_though_the_ledger_dies(
    dropping_ledger: LedgerProcess,
) -> None:
    slow, *quick = [grant.ref for grant in dropping_ledger.grants("cell-0", tickets=3)]
    sealed(dropping_ledger, quick, 0)
    assert dropping_ledger.batch(1).manifest is not None
    dropping_ledger.publish(1)
    sealed(dropping_ledger, [grant.ref for grant in dropping_ledger.grants("cell-1", tickets=2)], 1)
    assert dropping_ledger.batch(2).manifest is not None
    dropping_ledger.publish(2)
    too_old = sealed(dropping_ledger, [slow], 0)
    assert dropping_ledger.batch(3).manifest is None
    assert (dropping_ledger.status().settled, dropping_ledger.status().dropped) == (0, 1)
    # The index still has its rows. The ledger listens for a third of the timeout.
    dropping_ledger.restart(cell_timeout_s=scaled(1.5))
    dropping_ledger.settle(too_old)
    assert dropping_ledger.batch(3).settled == 0
    new = [grant.ref for grant in dropping_ledger.grants("cell-1", tickets=2)]
    assert slow.ticket_id not in {ref.ticket_id for ref in new}
    sealed(dropping_ledger, new, 2)
    manifest = dropping_ledger.batch(3).manifest
    assert manifest is not None
    assert [ticket.ref for ticket in manifest.tickets] == new
    assert manifest.counts == IrregularTicketCounts(stale_dropped=1)


def test_a_filtered_ticket_is_replaced_and_stays_filtered(dropping_ledger: LedgerProcess) -> None:
    refs = [grant.ref for grant in dropping_ledger.grants()]
    assert len(refs) == 4
    drop = DropTicketRequest("cell-0", refs[0], "all 4 rewards are 1", "filtered")
    for _ in range(2):  # repeating it is harmless
        dropping_ledger.order("/drop", drop)
    assert len(dropping_ledger.lease(held=refs[1:]).grants) == 1
    dropping_ledger.restart()
    status = dropping_ledger.status()
    assert (status.filtered, status.dropped) == (1, 0)
    sealed(dropping_ledger, refs[1:3], 0)
    manifest = dropping_ledger.batch(1).manifest
    assert manifest is not None
    assert manifest.counts == IrregularTicketCounts(filtered=1)


REFUSED = 78


@pytest.fixture
def handing_ledger(start_ledger: StartLedger) -> LedgerProcess:
    """Start a ledger with batches 1 and 2 handed out and the weights of step 1 published."""
    started = start_ledger()
    started.paths.recipe.touch()
    claim_next_number(started.paths.generations_dir)
    started.open_generation(1)
    started.form_batch(1)
    started.publish(1)
    started.form_batch(2)
    return started


def quarantine(handing_ledger: LedgerProcess, step: int, *options: str) -> int:
    return exit_code_of("quarantine", handing_ledger.paths.root, step, *options)


def test_a_batch_that_the_trainer_at_work_has_trained_is_refused(
    handing_ledger: LedgerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """No checkpoint holds it yet: only the ledger's state on disk shows it."""
    assert quarantine(handing_ledger, 1) == REFUSED
    refusal = capsys.readouterr().err
    assert "batch 1 was trained already: the trainer at work has reached step 1" in refusal
    assert f"try: areal-hpc cancel {handing_ledger.paths.root} --now" in refusal
    assert read_quarantine_files(handing_ledger.paths) == {}


def test_a_batch_in_the_trainers_hands_is_set_aside_until_it_has_passed_it(
    handing_ledger: LedgerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quarantine(handing_ledger, 2) == 0
    assert "If it is at work on it right now, it goes on as before" in capsys.readouterr().out
    assert quarantine(handing_ledger, 2, "--undo") == 0
    assert "no longer quarantined: the trainer trains it" in capsys.readouterr().out
    assert quarantine(handing_ledger, 2) == 0
    handing_ledger.publish(2)
    assert quarantine(handing_ledger, 2, "--undo") == REFUSED
    assert "the trainer at work has reached step 2 without batch 2" in capsys.readouterr().err
    assert [*read_quarantine_files(handing_ledger.paths)] == [2]


def test_what_a_trainer_trained_that_is_gone_can_be_set_aside(
    handing_ledger: LedgerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next trainer resumes from the checkpoint, of which there is none."""
    claim_next_number(handing_ledger.paths.generations_dir)
    assert quarantine(handing_ledger, 2) == 0
    assert "the trainer sets it aside when it gets there from step 0" in capsys.readouterr().out
    handing_ledger.kill()
    assert quarantine(handing_ledger, 1) == 0
    assert "when the run is resumed (no ledger answers now)" in capsys.readouterr().out
