"""Recorded conversations: search, display, and control characters that reach no terminal."""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.cli.inspect import _format_log_line
from areal_hpc.cli.main import main
from areal_hpc.errors import AgentError, RecipeError, ShardError, escape_controls
from areal_hpc.jobs.processes.process_setup import EscapingFormatter
from areal_hpc.metrics.alerts import Alert
from areal_hpc.rollout.execution.agent_errors import build_agent_error
from areal_hpc.rundir.manifests import DroppedTicket, append_drop, write_manifest
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
from areal_hpc.view.transcripts.row_filter import compile_filter
from areal_hpc.view.transcripts.row_index import RowIndex
from areal_hpc.view.transcripts.row_search import RowQuery, find_rows, format_groups
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.ledger import NO_VERSION, BatchManifest, SealedTicket, TicketRef
from areal_hpc.wire.trajectory import CallRecord, RowKind, RowRecord, TrajectoryRow
from tests.support.commands import exit_code_of
from tests.support.sample_trajectories import seal_in, trajectory
from tests.unit.view.run_directory import RunDirectory
from tests.unit.view.test_situations import AT_WORK, NOW, evidence

QUESTION = {"role": "user", "content": "What is 2 + 2?"}
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RowIndex]:
    """Index of one failed episode with the reward 0.25, at the evaluation of step 20."""
    paths = RunPaths(tmp_path_factory.mktemp("index"))
    seal_in(paths, [replace(trajectory(1, reward=0.25), kind=RowKind.FAILED, eval_step=20)])
    with closing(RowIndex(paths, None)) as made:
        made.index_new_rows()
        yield made


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "comparisons are joined wrongly"),
        ("stepp=20", "there is no field 'stepp'"),
        ("step 20", "'step20' is no comparison of a field with a value"),
        ("step=", "'step=' is no comparison"),
        ("step=x", "step is a number, got 'x'"),
        ("step~2", "step is a number: `~` is for texts"),
        ("kind<a", "kind is a text, which takes =, != or ~, got <"),
        ("step=1 kind=a", "comparisons are joined wrongly"),
        ("(step=1", "comparisons are joined wrongly"),
        ("step='1", '"step=\'1" is no comparison'),
        (
            "(" * 900 + "step=1" + ")" * 900,
            "comparisons are joined wrongly (parser stack overflow)",
        ),
        ("x" * 3000, "at most 2000 characters"),
        ("__import__('os')", "\"__import__'os'\" is no comparison"),
    ],
)
def test_a_wrong_expression_is_refused_with_the_place_and_the_fields(text: str, part: str) -> None:
    with pytest.raises(RecipeError) as caught:
        compile_filter(text)
    assert part in str(caught.value)
    assert "at: --where" in str(caught.value)
    assert "there are kind, step, ticket" in str(caught.value)


@given(st.text(alphabet="stepkind=<>!~()'\" 0.andornot", max_size=40))
def test_any_text_is_an_expression_or_an_error_in_words(index: RowIndex, text: str) -> None:
    with suppress(RecipeError):
        assert len(index.find_values([], text)) <= 1


def conversation(ticket_id: int, episode: int, reply: str, **fields: Any) -> TrajectoryRow:
    """Make a question, a tool call, its result and an answer, in two calls."""
    messages = [
        QUESTION,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": CALL}],
        },
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": reply},
    ]
    reward = Reward(float(episode), {"format": 0.5}, {"tool_errors": 2}, "well done")
    calls = [
        CallRecord(id="a", new_messages=1, asked_at=10.0, answered_at=10.25, reply_tokens=7),
        CallRecord(
            id="b",
            new_messages=1,
            asked_at=11.0,
            answered_at=12.5,
            reply_tokens=3,
            finish_reason="length",
            reward=reward,
        ),
    ]
    record = RowRecord(
        session_id=f"s-{ticket_id}-{episode}",
        task_index=7,
        cell="cell-0",
        started_at=9.0,
        ended_at=13.0,
        calls=calls,
    )
    row = replace(
        trajectory(ticket_id, episode, tokens=6 + 2 * episode, reward=float(episode)),
        record=record,
        meta={"messages": messages},
    )
    return replace(row, **fields)


@pytest.fixture
def run(paths: RunPaths) -> RunPaths:
    """Two tickets, of which step 3 trained the first; a held-out and a failed episode."""
    trained = [conversation(1, 0, "four"), conversation(1, 1, "4"), conversation(2, 0, "five")]
    shard = seal_in(paths, trained)
    ticket = SealedTicket(TicketRef(1, 1), shard.file, [0, 1], [0.0, 1.0], NO_VERSION)
    write_manifest(paths, BatchManifest(3, 1, [ticket]))
    failed = RowRecord(session_id="f", cause="KeyError at a.py:31", error="no\n  File 'a.py'")
    seal_in(
        paths,
        [
            conversation(0, 0, "held out", kind=RowKind.EVALUATION, eval_step=4),
            replace(trajectory(2, 1, tokens=0), kind=RowKind.FAILED, record=failed, meta={}),
        ],
    )
    return paths


def find_numbers(run: RunPaths, where: str = "", sort_by: str = "", **query: Any) -> list[int]:
    rows, _ = find_rows(run.root, RowQuery(where, sort_descending_by=sort_by, **query))
    return [row.number for row in rows]


@pytest.mark.parametrize(
    ("where", "numbers"),
    [
        ("", [0, 1, 2, 3, 4]),
        ("step=3 and reward<0.5", [0]),
        ("step=4", [3]),
        ("kind=failed", [4]),
        ("kind!=train", [3, 4]),
        ("length>=4", [1]),
        ("tokens=8", [1]),
        ("seconds=4 and calls=2 and task=7 and cell=cell-0", [0, 1, 2, 3]),
        ("finish=length and kind=train", [0, 1, 2]),
        ("cause~keyerror", [4]),
        ("note~DONE and ticket=2", [2]),
        ("text~five", [2]),
        ("part.format=0.5 and metric.tool_errors>1 and episode=1", [1]),
        ("part.other=0.5 or part.other<=0", []),
        ("part.other!=0 and not (kind=train or step=4)", [4]),
        ("not (kind=train or step=4) or ticket=2", [2, 4]),
        ("ticket=1 and reward<=0 or kind = 'failed'", [0, 4]),
        ('(step=1 or step>=4) and kind~"VAL" and reward>-1e3', [3]),
        ("attempt=1 and ticket=1", [0, 1]),
    ],
)
def test_rows_are_found_by_what_was_recorded(run: RunPaths, where: str, numbers: list[int]) -> None:
    assert find_numbers(run, where) == numbers


def test_rows_are_sorted_by_a_field_and_those_without_it_come_last(run: RunPaths) -> None:
    assert find_numbers(run, sort_by="length")[0] == 1
    assert find_numbers(run, sort_by="seconds")[-1] == 4
    assert find_numbers(run, sort_by="step") == [3, 0, 1, 2, 4]
    assert find_numbers(run, sort_by="length", max_rows=1) == [1]
    assert find_numbers(run, max_rows=2) == [3, 4]
    assert find_numbers(run, ticket_id=2) == [2, 4]
    with pytest.raises(RecipeError, match="no row of ticket 9"):
        find_numbers(run, ticket_id=9)
    with pytest.raises(RecipeError, match="no field 'size'"):
        find_numbers(run, sort_by="size")


def shown(run: RunPaths, where: str, width: int = 100) -> list[str]:
    rows, _ = find_rows(run.root, RowQuery(where))
    return format_groups(rows, width).splitlines()


def test_episodes_of_a_ticket_stand_side_by_side_after_what_they_share(run: RunPaths) -> None:
    lines = shown(run, "ticket=1 and kind=train")
    assert lines[0] == "ticket 1, attempt 1, step 3, task 7: reward 0 1"
    assert lines[1:3] == ["user", "  What is 2 + 2?"]
    body = [[part.strip() for part in line.split("\u2502")] for line in lines[4:]]
    assert all(len(parts) == 2 for parts in body)
    left, right = ([parts[side] for parts in body] for side in (0, 1))
    assert "row 0, train, episode 0, reward 0, 3 of 6" in left[0]
    for side, answer in ((left, "four"), (right, "4")):
        text = "\n".join(side)
        assert "assistant  (0.25 s, 7 tokens)" in text
        assert '\u2192 add({"a":2,"b":2})' in text
        assert f"assistant  (1.50 s, 3 tokens, length)\n{answer}\n= reward" in text
        assert "well done" in text
    assert "What is 2 + 2?" not in "\n".join(left)


def test_on_a_narrow_screen_episodes_stand_below_one_another(run: RunPaths) -> None:
    lines = shown(run, "ticket=1 and kind=train", width=60)
    assert not any("\u2502" in line for line in lines)
    assert max(map(len, lines)) <= 60
    assert sum(line.startswith("\u2500\u2500 row") for line in lines) == 2


def test_held_out_and_failed_episodes_are_shown_alike(run: RunPaths) -> None:
    assert shown(run, "kind=evaluation")[0] == "held-out task 0, attempt 1, step 4: reward 0"
    failed = shown(run, "kind=failed")
    assert failed[-3:] == ["failed", "  no", "    File 'a.py'"]


def test_sessions_of_people_are_a_group_each(paths: RunPaths) -> None:
    personal = [
        replace(row, ticket_id=-1, kind=RowKind.PERSONAL)
        for row in (conversation(5, 0, "four"), conversation(6, 0, "five"))
    ]
    shard = seal_in(paths, personal)
    lines = shown(paths, "kind=personal")
    titles = [line for line in lines if line.startswith("session ")]
    assert titles == ["session s-5-0: reward 0", "session s-6-0: reward 0"]
    with closing(RowIndex(paths, None)) as index:
        index.index_new_rows()
        group = index.select_related_rows(Path(shard.file).name, 1)["group"]
    assert [row["reply"] for row in group] == ["five"]


def test_a_list_of_rows_shows_the_first_question_and_the_last_reply(paths: RunPaths) -> None:
    texts = ("What is 2 + 2?", "5", "Sure?", "4")
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * 2, texts, strict=True)
    ]
    seal_in(paths, [replace(trajectory(1), meta={"messages": messages})])
    with closing(RowIndex(paths, None)) as index:
        index.index_new_rows()
        (row,) = index.find_page(offset=0, count=1).rows
    assert (row["question"], row["reply"]) == ("What is 2 + 2?", "4")


def test_what_a_model_says_reaches_no_terminal_as_control_characters(paths: RunPaths) -> None:
    seal_in(paths, [conversation(1, 0, "\x1b[2Jgone\u202eabc \u65e5\u672c" + "\u65e5" * 60)])
    lines = shown(paths, "", width=40)
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert "\\x1b[2Jgone\\u202eabc" in text
    assert "\u65e5" * 19 in text  # each takes two cells
    assert "\u65e5" * 20 not in text


def test_messages_of_any_form_are_shown(paths: RunPaths) -> None:
    odd = [
        {"role": "assistant", "tool_calls": ["x", {"function": 5}], "content": [{"type": "image"}]},
        {"content": {"a": [1]}},
        "no message",
    ]
    seal_in(paths, [replace(trajectory(1), meta={"messages": odd})])
    text = "\n".join(shown(paths, ""))
    assert '[image]\n  \u2192 x\n  \u2192 {"function":5}\n?\n  {"a":[1]}' in text


def test_a_filter_reads_the_whole_of_a_long_conversation(paths: RunPaths) -> None:
    messages = [{"role": "user", "content": "x" * 200_000 + "needle"}]
    seal_in(paths, [replace(trajectory(1), meta={"messages": messages}), trajectory(2)])
    ((row,), count) = find_rows(paths.root, RowQuery("text~needle"))
    assert (row.read().ticket_id, count) == (1, 1)


@pytest.mark.parametrize(("text", "count"), [("=0.8", 1), ("<=0.8", 1), ("!=0.8", 0), ("<0.8", 0)])
def test_a_filter_finds_a_reward_as_it_is_shown(paths: RunPaths, text: str, count: int) -> None:
    seal_in(paths, [trajectory(1, reward=0.8)])
    assert find_rows(paths.root, RowQuery(f"reward{text}"))[1] == count


def test_rows_of_a_damaged_shard_are_no_rows_left_out(paths: RunPaths) -> None:
    damaged = paths.shards_dir / seal_in(paths, [trajectory(1)]).file
    seal_in(paths, [trajectory(2)])
    with h5py.File(damaged, "r+") as file:
        file["record"][:] = 0
    for query in (RowQuery("reward>0"), RowQuery(ticket_id=2)):
        with pytest.raises(ShardError, match="record: expected a JSON object"):
            find_rows(paths.root, query)


def test_a_number_and_a_filter_are_no_query(paths: RunPaths) -> None:
    seal_in(paths, [trajectory(1)])
    with pytest.raises(RecipeError, match="a row's number and a filter"):
        find_rows(paths.root, RowQuery("reward>0", row_number=0))


ATTACK = "\x1b]52;c;aGk=\x07\x1b[1A\x1b[2K\x9b2J\u202e"
"""Text that writes the clipboard, deletes the line above, clears the screen, turns the text."""
SHOWN = "\\x1b]52;c;aGk=\\x07\\x1b[1A\\x1b[2K\\x9b2J\\u202e"


def make_failure() -> AgentError:
    """Make a driver's error of an agent that repeats a reply in its exception."""
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
    assert all(character.isprintable() or character == "\n" for character in text)


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
    assert exit_code_of("audit", run.paths.root, "--tickets") == 0
    assert_is_shown_spelled_out(capsys.readouterr().out)


def test_line_breaks_stay_and_a_tab_is_a_space() -> None:
    assert escape_controls("a\tb\n\rc") == "a b\n\\rc"
    assert escape_controls("日本 é") == "日本 é"
