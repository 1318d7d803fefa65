"""What drivers' and servers' events become: counted failures, news told once, a phase in words."""

from pathlib import Path
from typing import Any

import pytest

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
from areal_hpc.wire.ledger import LedgerStatus
from tests.unit.view.test_diagnosis import AT_WORK, NOW, evidence


def event(
    name: str, role: str = "driver-cell-0", time: float = NOW, **facts: Any
) -> dict[str, Any]:
    return {"time": time, "role": role, "event": name, **facts}


def failed(place: str, number: int, of: int, role: str = "driver-cell-0") -> dict[str, Any]:
    message = "the agent raised KeyError: 'x'"
    reason = f"{message}\n  at: {place}\nTraceback (most recent call last):\nKeyError: 'x'"
    return event(
        "episode_failed", role, NOW + number, kind="KeyError", at=place, message=message,
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
def test_a_follower_reads_what_is_appended_after_it_was_made(
    tmp_path: Path, begun_afresh: bool
) -> None:
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
    (found,) = collect_failure_events([event("weights_published", "trainer", **facts)], None)
    assert found.text == "no replica has taken weights 1.3: differ by 0.4 on average"
    some = event("weights_published", "trainer", **facts, replicas=2)
    assert list(collect_failure_events([some], None)) == []
