"""Drivers' and servers' events, and logs of many processes as one stream."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import EventFollower, EventLog
from areal_hpc.view.diagnosis import diagnose
from areal_hpc.view.events import (
    MAX_SHOWN_CAUSES,
    AgentFailures,
    NewEventLineFormatter,
    RunPhaseTracker,
    collect_failure_events,
    read_server_phase,
)
from areal_hpc.view.logs import LogFollower, list_log_files, parse_log_records, read_last_lines
from areal_hpc.wire.ledger import LedgerStatus
from tests.unit.view.test_situations import AT_WORK, NOW, evidence


def event(
    name: str, role: str = "driver-cell-0", time: float = NOW, **facts: Any
) -> dict[str, Any]:
    return {"time": time, "role": role, "event": name, **facts}


def failed(location: str, number: int, of: int, role: str = "driver-cell-0") -> dict[str, Any]:
    message = "the agent raised KeyError: 'x'"
    reason = f"{message}\n  at: {location}\nTraceback (most recent call last):\nKeyError: 'x'"
    return event(
        "episode_failed", role, NOW + number, kind="KeyError", at=location, message=message,
        reason=reason, failed=number, ended=of,
    )  # fmt: skip


def test_failures_are_counted_over_cells_and_told_once_for_each_cause() -> None:
    news = NewEventLineFormatter()
    first = news.describe_news(failed("/a.py:3", 1, 1))
    assert (
        first[0] == "agent    raised KeyError: 'x'  (in 1 of 1 episode so far; it is tried again)"
    )
    assert first[1:] == ["         at: /a.py:3", "         try: fix /a.py:3"]
    earning = NewEventLineFormatter().describe_news(
        {**failed("/a.py:3", 1, 1), "then": "it earns -0.5"}
    )
    assert earning[0].endswith("(in 1 of 1 episode so far; it earns -0.5)")
    assert news.describe_news(failed("/a.py:3", 2, 5)) == []
    assert "(in 3 of 7 episodes" in news.describe_news(failed("/b.py:1", 1, 2, "driver-cell-1"))[0]
    assert [cause.count for cause in news.failures.causes.values()] == [2, 1]
    others = [news.describe_news(failed(f"/c.py:{line}", 3, 9)) for line in range(MAX_SHOWN_CAUSES)]
    assert [len(lines) for lines in others] == [3, 3, 3, 1, 0]
    assert "areal-hpc why" in others[-2][0]


def test_an_agent_works_once_an_episode_ended_well_after_its_failures() -> None:
    events = [failed("/a.py:3", number, number) for number in (1, 2, 3)]
    assert AgentFailures.collect(events).is_agent_always_failing
    events.append(event("episodes_counted", failed=3, ended=9))
    failures = AgentFailures.collect(events)
    assert (failures.failed, failures.ended, failures.is_agent_always_failing) == (3, 9, False)
    diagnosis = diagnose(evidence(AT_WORK, events=tuple(events)))
    assert diagnosis.is_well
    assert "running, after this: the agent raised KeyError: 'x' at /a.py:3" in diagnosis.headline
    diagnosis = diagnose(evidence(AT_WORK, events=tuple(events[:3])))
    assert not diagnosis.is_well
    assert "but its agent fails in 3 of 3 episodes: the agent raised" in diagnosis.headline
    assert diagnosis.hint.startswith("fix /a.py:3")


def test_dead_servers_and_processes_are_told_with_their_last_words() -> None:
    died = event(
        "replica_died", "cell-1", replica=0, reason="exited with code 1",
        last_line="RuntimeError: out of blocks", log="/logs/replica-0.1.log",
    )  # fmt: skip
    lines = NewEventLineFormatter().describe_news(died)
    assert lines == [
        "server   SGLang 0 of cell-1 exited with code 1: RuntimeError: out of blocks; "
        "it is started again",
        "         try: read /logs/replica-0.1.log",
    ]
    assert (
        "exited with code 1: RuntimeError" in diagnose(evidence(AT_WORK, events=(died,))).headline
    )
    ended = event("process_exited", "cell-0", process="proxy", exit_code=137)
    assert NewEventLineFormatter().describe_news(ended) == [
        "process  proxy of cell-0 ended: killed by SIGKILL, which usually means out of memory",
        "         try: request more memory for that job, or reduce its load",
    ]
    assert NewEventLineFormatter().describe_news({**ended, "exit_code": 70}) == [], (
        "the command says it better"
    )


def test_a_hang_is_told_once_for_each_line() -> None:
    news = NewEventLineFormatter()
    slow = event("episode_slow", seconds=31.0, at="/a.py:9", task=2, episode=1, limit_s=600.0)
    line, _ = news.describe_news(slow)
    assert "has run for 31 s without an end, waiting at /a.py:9 (episode 1 of task 2)" in line
    assert news.describe_news({**slow, "seconds": 62.0}) == []
    assert news.describe_news({**slow, "at": "/a.py:10"}) != []


def test_the_phase_goes_from_servers_over_weights_to_episodes(tmp_path: Path) -> None:
    log, phase = tmp_path / "replica-0.1.log", RunPhaseTracker()
    log.write_text("[04:31] Load weight begin. avail mem=15 GB\n")
    assert phase.describe(None).startswith("the trainer starts")
    phase.add_event(event("replica_started", "cell-0", replica=0, log=str(log)))
    assert phase.describe(None).startswith("SGLang 0 of cell-0 loads weights, ")
    log.write_text(f"{log.read_text()}[04:32] Capture cuda graph begin.\n")
    assert read_server_phase(log) == "captures CUDA graphs"
    phase.add_event(event("replica_ready", "cell-0", replica=0))
    phase.add_event(event("ranks_joined", "trainer"))
    assert phase.describe(None).startswith("the trainer loads the model")
    phase.add_event(event("state_loaded", "trainer"))
    assert phase.describe(None).startswith("replicas get the trainer's weights")
    phase.add_event(event("weights_published", "trainer", replicas=1))
    assert phase.describe(None) == ""
    ledger = LedgerStatus(
        version_step=2, formed_step=2, episodes_done=12, episodes_wanted=80, slowest_episode_s=41.2
    )
    assert phase.describe(ledger) == "generation for step 3: 12 of 80 episodes, slowest 41 s"
    evaluating = LedgerStatus(version_step=2, eval_done=3, eval_total=8)
    assert phase.describe(evaluating) == "evaluation of step 2: 3 of 8 held-out episodes"
    assert phase.describe(LedgerStatus(version_step=2, formed_step=3)) == "step 3 is trained"


@pytest.mark.parametrize("begun_afresh", [False, True])
def test_a_follower_reads_what_is_appended_later(tmp_path: Path, begun_afresh: bool) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "driver")
    log.record("before")
    follower = EventFollower(path)
    assert follower.read_new_events() == []
    if begun_afresh:
        path.rename(tmp_path / "earlier.jsonl")
    log.record("after")
    with path.open("a") as stream:
        stream.write('{"event": 3}\nnot JSON\n{"time": 1, "role": "x", "event": "unfin')
    assert [row["event"] for row in follower.read_new_events()] == ["after"]
    with path.open("a") as stream:
        stream.write('ished"}\n')
    assert [row["event"] for row in follower.read_new_events()] == ["unfinished"]


def test_weights_that_no_replica_takes_are_a_failure_with_its_reason() -> None:
    facts: dict[str, Any] = {
        "version": "1.3",
        "failed": ["cell-0/0"],
        "reason": "differ by 0.4 on average",
    }
    (failure,) = collect_failure_events([event("weights_published", "trainer", **facts)], None)
    assert failure.text == "no replica has taken weights 1.3: differ by 0.4 on average"
    some = event("weights_published", "trainer", **facts, replicas=2)
    assert list(collect_failure_events([some], None)) == []


def make_run(folder: Path) -> RunPaths:
    paths = RunPaths(folder / "exp" / "one")
    logs = paths.log_dir(1)
    for name, text in {
        "trainer/restart_00/trainer-0.log": "node n01 job 7 restart 0\n"
        "2026-11-22 10:00:01,000 INFO a\n",
        "trainer/restart_01/trainer-0.log": "node n03 job 7 restart 1\n"
        "2026-11-22 10:00:05,000 INFO e\n",
        "cell-0/restart_00/proxy.log": "node n02 job 8 restart 0\n"
        "2026-11-22 10:00:02,000 INFO b\n  more of b\n",
        "cell-0/restart_00/replica-0.1.log": "[2026-11-22 10:00:03] c\n[2026-11-22 10:00:04] d\n",
    }.items():
        path = logs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return paths


def test_lines_of_all_processes_come_in_the_order_of_time(tmp_path: Path) -> None:
    lines = read_last_lines(list_log_files(make_run(tmp_path), 1), 100)
    words = [line.split()[-1] for file, line in lines if "restart" not in line]
    assert words == ["a", "b", "b", "c", "d", "e"]
    assert [line for _, line in read_last_lines(list_log_files(make_run(tmp_path), 1), 2)] == [
        "[2026-11-22 10:00:04] d",
        "2026-11-22 10:00:05,000 INFO e",
    ]


def test_lines_of_every_batch_and_request_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    paths = make_run(tmp_path)
    log = paths.log_dir(1) / "cell-0" / "restart_00" / "replica-0.1.log"
    routine = (
        "[2026-11-22 10:00:06] Prefill batch, #new-seq: 1, #new-token: 27\n"
        "[2026-11-22 10:00:06 TP0] Decode batch, #running-req: 1, #token: 34\n"
        '[2026-11-22 10:00:06] INFO:     127.0.0.1:4000 - "GET /health_generate HTTP/1.1" 200 OK\n'
    )
    log.write_text(f"{log.read_text()}{routine * 50}[2026-11-22 10:00:07] Scheduler hit an error\n")
    files = list_log_files(paths, 1)
    shown = [line for _, line in read_last_lines(files, 2, keep_routine=False)]
    assert shown == [
        "2026-11-22 10:00:05,000 INFO e",
        "[2026-11-22 10:00:07] Scheduler hit an error",
    ]
    assert "Decode batch" in read_last_lines(files, 3)[0][1]


def test_jobs_and_processes_can_be_asked_for(tmp_path: Path) -> None:
    paths = make_run(tmp_path)

    def list_processes(*wanted: str) -> list[str]:
        return [file.process for file in list_log_files(paths, 1, wanted)]

    assert list_processes("trainer") == ["trainer-0", "trainer-0"]
    assert list_processes("cell-0/proxy") == ["proxy"]
    assert list_processes("proxy", "trainer-0") == ["proxy", "trainer-0", "trainer-0"]
    assert list_processes("nobody") == []


def test_what_is_added_is_followed_into_new_restarts_and_attempts(tmp_path: Path) -> None:
    paths = make_run(tmp_path)
    follower = LogFollower(paths, ["trainer"])
    assert follower.read_new_lines() == []
    old = paths.log_dir(1) / "trainer" / "restart_01" / "trainer-0.log"
    with old.open("a") as stream:
        stream.write("whole\nhal")
    assert [line for _, line in follower.read_new_lines()] == ["whole"]
    with old.open("a") as stream:
        stream.write("f\n")
    assert [line for _, line in follower.read_new_lines()] == ["half"]
    new = paths.log_dir(2) / "trainer" / "restart_00" / "trainer-0.log"
    new.parent.mkdir(parents=True)
    new.write_text("node n02 job 9 restart 0\n")
    shown = follower.read_new_lines()
    assert [(file.node, line) for file, line in shown] == [("n02", "node n02 job 9 restart 0")]


def test_a_run_that_is_removed_and_begun_anew_is_followed_on(tmp_path: Path) -> None:
    paths = make_run(tmp_path)
    follower = LogFollower(paths, ["trainer"])
    shutil.rmtree(paths.root)
    assert follower.read_new_lines() == []
    make_run(tmp_path)
    assert follower.read_new_lines()


@given(st.text(max_size=300))
def test_no_line_is_lost_and_no_record_goes_back_in_time(text: str) -> None:
    records = parse_log_records(text)
    assert [line for record in records for line in record.lines] == text.splitlines()
    assert [record.time for record in records] == sorted(record.time for record in records)
