"""What a model says never controls the terminal of the person who looks at a run."""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_hpc.cli.inspect import _audit_tickets, _format_log_line
from areal_hpc.cli.main import main
from areal_hpc.errors import AgentError, escape_controls
from areal_hpc.jobs.processes.process_setup import EscapingFormatter
from areal_hpc.metrics.alerts import Alert
from areal_hpc.rollout.execution.agent_errors import build_agent_error
from areal_hpc.rundir.manifests import DroppedTicket, append_drop
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.view.diagnosis import diagnose, format_diagnosis
from areal_hpc.view.evaluation_report import (
    EvaluatedSet,
    EvaluationReport,
    WrittenEstimate,
    format_report,
)
from areal_hpc.view.formatting import Answer, Finding, format_answer
from areal_hpc.view.state.live_progress import PlainReporter
from areal_hpc.view.state.run_view import RunView
from areal_hpc.view.state.summary import describe_activity, format_alert
from areal_hpc.wire.ledger import TicketRef
from tests.unit.view.run_directory import RunDirectory
from tests.unit.view.test_situations import AT_WORK, NOW, evidence

ATTACK = "\x1b]52;c;aGk=\x07\x1b[1A\x1b[2K\x9b2J\u202e"
"""Writes the clipboard, deletes the line above, clears the screen, turns the text round."""
SHOWN = "\\x1b]52;c;aGk=\\x07\\x1b[1A\\x1b[2K\\x9b2J\\u202e"


def make_failure() -> AgentError:
    """What a driver makes of an agent that repeats a reply in its exception."""
    try:
        raise ValueError(f"bad reply: {ATTACK}")
    except ValueError as error:
        return build_agent_error(error, error.__traceback__)


def record_failure(paths: RunPaths) -> None:
    error = make_failure()
    EventLog(paths.events, "driver-cell-0").record(
        "episode_failed",
        kind=error.kind,
        message=error.problems[0].message,
        at=error.problems[0].key,
        reason=f"{error}\n{error.trace}",
        failed=1,
        ended=1,
    )


def assert_is_shown_spelled_out(text: str) -> None:
    assert SHOWN in text
    assert all(one.isprintable() or one == "\n" for one in text)


def test_run_obeys_no_failed_agent(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = PlainReporter(paths, total_steps=3, sft_steps=0)
    record_failure(paths)
    reporter.close()
    assert_is_shown_spelled_out(capsys.readouterr().out)


def test_why_and_status_tell_of_a_failed_agent_without_obeying_it(paths: RunPaths) -> None:
    record_failure(paths)
    assert_is_shown_spelled_out("\n".join(describe_activity(RunView(paths))))
    error = make_failure()
    failed = {
        **{"time": NOW, "role": "driver-cell-0", "event": "episode_failed", "failed": 3},
        **{"ended": 3, "message": str(error), "reason": f"{error}\n{error.trace}"},
    }
    lines = format_diagnosis(diagnose(evidence(AT_WORK, events=(failed,))), "RUN")
    assert_is_shown_spelled_out("\n".join(lines))
    assert_is_shown_spelled_out(lines[-2])  # the end of the traceback


@pytest.mark.parametrize(
    "shown",
    [
        lambda: format_alert(Alert("failing_agents", "failure", 0, ATTACK, "areal-hpc why RUN")),
        lambda: _format_log_line("cell-0/driver", f"a reply: {ATTACK}"),
        lambda: EscapingFormatter("%(levelname)s %(message)s").format(
            logging.makeLogRecord({"msg": "a reward failed: %s", "args": (ATTACK,)})
        ),
        lambda: "\n".join(format_answer(Answer("slow", (Finding(f"tool {ATTACK}"),)), "RUN")),
        lambda: "\n".join(
            format_report(
                EvaluationReport(
                    "m",
                    sets={"a": EvaluatedSet("", {"avg@1": WrittenEstimate(0, 0, 0, 1)}, [[0.0]], [],
                                            {0: ATTACK})},
                )
            )
        ),
    ],
)  # fmt: skip
def test_lines_about_a_run_spell_out_what_a_model_said(shown: Callable[[], str]) -> None:
    assert_is_shown_spelled_out(shown())


def test_an_error_of_a_command_is_spelled_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["status", f"no{ATTACK}"])
    assert_is_shown_spelled_out(capsys.readouterr().err)


def test_audit_spells_out_why_it_drops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path / "run")
    append_drop(run.paths, DroppedTicket(TicketRef(7, 1), str(make_failure())))
    _audit_tickets(argparse.Namespace(run=run.paths.root, tickets=True))
    assert_is_shown_spelled_out(capsys.readouterr().out)


def test_line_breaks_stay_and_a_tab_is_a_space() -> None:
    assert escape_controls("a\tb\n\rc") == "a b\n\\rc"
    assert escape_controls("日本 é") == "日本 é"
