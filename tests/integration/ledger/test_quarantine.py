"""`areal-hpc quarantine` beside a ledger at work, which knows how far the trainer is."""

import pytest

from areal_hpc.rundir.files import claim_next_number
from areal_hpc.rundir.manifests import read_quarantine_files
from tests.integration.ledger.ledger_process import LedgerProcess, StartLedger
from tests.support.commands import exit_code_of

REFUSED = 78


@pytest.fixture
def ledger(start_ledger: StartLedger) -> LedgerProcess:
    """Batches 1 and 2 are handed out; the weights of step 1 are published."""
    started = start_ledger()
    started.paths.recipe.touch()
    claim_next_number(started.paths.generations_dir)
    started.open_generation(1)
    started.form_batch(1)
    started.publish(1)
    started.form_batch(2)
    return started


def quarantine(ledger: LedgerProcess, step: int, *options: str) -> int:
    return exit_code_of("quarantine", ledger.paths.root, step, *options)


def test_a_batch_that_the_trainer_at_work_has_trained_is_refused(
    ledger: LedgerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """No checkpoint holds it yet: nothing on disk but the ledger's state says so."""
    assert quarantine(ledger, 1) == REFUSED
    refusal = capsys.readouterr().err
    assert "batch 1 was trained already: the trainer at work has reached step 1" in refusal
    assert f"try: areal-hpc cancel {ledger.paths.root} --now" in refusal
    assert read_quarantine_files(ledger.paths) == {}


def test_a_batch_in_the_trainers_hands_is_set_aside_until_it_has_passed_it(
    ledger: LedgerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quarantine(ledger, 2) == 0
    assert "If it is at work on it right now, it goes on as before" in capsys.readouterr().out
    assert quarantine(ledger, 2, "--undo") == 0
    assert "no longer quarantined: the trainer trains it" in capsys.readouterr().out
    assert quarantine(ledger, 2) == 0
    ledger.publish(2)
    assert quarantine(ledger, 2, "--undo") == REFUSED
    assert "the trainer at work has reached step 2 without batch 2" in capsys.readouterr().err
    assert [*read_quarantine_files(ledger.paths)] == [2]


def test_what_a_trainer_trained_that_is_gone_can_be_set_aside(
    ledger: LedgerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its successor goes back to the checkpoint, of which there is none."""
    claim_next_number(ledger.paths.generations_dir)
    assert quarantine(ledger, 2) == 0
    assert "the trainer sets it aside when it gets there from step 0" in capsys.readouterr().out
    ledger.kill()
    assert quarantine(ledger, 1) == 0
    assert "when the run is resumed (no ledger answers now)" in capsys.readouterr().out
