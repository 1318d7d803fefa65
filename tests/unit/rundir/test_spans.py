"""Spans of processes are bounded and give way to other work; Prometheus reads their metrics."""

import json
import math
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from areal_hpc.rundir.jsonl import append_lines
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry import prometheus
from areal_hpc.rundir.telemetry.prometheus import (
    PrometheusSample,
    build_samples,
    register_sample_reader,
    serve_process_metrics,
)
from areal_hpc.rundir.telemetry.span_reader import (
    UNDER_WAY,
    ProcessSpans,
    read_span_lines,
    read_spans,
)
from areal_hpc.rundir.telemetry.spans import (
    MAX_PENDING_SPANS,
    ProcessStart,
    Span,
    SpanLog,
    get_older_path,
    log_spans_of_process,
    record_span,
    record_state_entry,
    time_span,
)
from tests.support.full_disk import full_disk
from tests.support.waiting import wait_for

NOW = 1_700_000_000.0


def make_paths(root: Path) -> RunPaths:
    paths = RunPaths(root)
    paths.spans_dir.mkdir()
    return paths


def read_one(paths: RunPaths) -> ProcessSpans:
    (process,) = read_spans(paths)
    return process


def test_what_a_process_did_is_read_back_with_its_states(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    record_span("of no process", NOW, NOW + 1)
    with log_spans_of_process(paths.spans("cell-0-driver")):
        record_state_entry("start")
        record_state_entry("idle")
        with time_span("episode", "episodes", ticket_id=3) as facts:
            facts["status"] = "ok"
        record_span("seal", NOW, NOW + 2.5, "shards")
        record_state_entry("episodes")
    process = read_one(paths)
    assert (process.name, process.pid, process.lanes) == (
        *("cell-0-driver", os.getpid()),
        ["", "episodes", "shards"],
    )
    by_name = {span.name: span for span in process.spans}
    assert by_name.keys() == {"start", "idle", "episode", "seal", "episodes"}
    assert by_name["episode"].facts == {"ticket_id": 3, "status": "ok"}
    assert (by_name["seal"].begin, by_name["seal"].end) == (NOW, NOW + 2.5)


def test_what_lasts_is_seen_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_hpc.rundir.telemetry.spans.LASTING_SPAN_REPORT_DELAY_S", 0.0)
    monkeypatch.setattr("areal_hpc.rundir.telemetry.spans.FLUSH_INTERVAL_S", 0.01)
    paths = RunPaths(tmp_path)
    path = paths.spans("cell-0-driver")

    def get_statuses() -> dict[int, str]:
        processes = read_spans(paths)
        spans = processes[0].spans if processes else []
        return {span.facts["episode"]: span.facts.get("status", "") for span in spans}

    with log_spans_of_process(path):
        with time_span("episode", "episodes", episode=1):
            wait_for(lambda: get_statuses() == {1: UNDER_WAY})
        with time_span("episode", "episodes", episode=2) as facts:
            wait_for(lambda: 2 in get_statuses())
            facts["status"] = "ok"
    assert path.read_text().count('"begun"') == 2
    assert get_statuses()[2] == "ok"


def test_files_keep_the_newest_in_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_hpc.rundir.telemetry.spans.STORAGE_LOOK_INTERVAL_S", 0.0)
    paths = make_paths(tmp_path)
    path, bound = paths.spans("cell-0-proxy"), 20_000
    log = SpanLog(path, max_file_bytes=bound)
    for number in range(2000):
        log.add(Span("call", NOW + number, NOW + number + 0.5, "replica 0", {"ticket_id": number}))
        if number % 50 == 49:
            log._flush()
    log.close()
    assert bound < path.stat().st_size + get_older_path(path).stat().st_size < 2.5 * bound
    trace = read_one(paths)
    assert [span.facts["ticket_id"] for span in trace.spans] == [*range(2000)][-len(trace.spans) :]
    assert len(trace.spans) > 150
    assert trace.begin == trace.spans[0].begin


@pytest.mark.parametrize("has_older", [False, True])
def test_a_file_that_becomes_the_older_one_while_it_is_read_is_read_once(
    has_older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_paths(tmp_path).spans("cell-0-proxy")
    span = Span("seal", NOW, NOW + 1, "", {})
    append_lines(path, [span])
    if has_older:
        append_lines(get_older_path(path), [Span("before", NOW - 2, NOW - 1, "", {})])
    open_file = Path.open

    def open_and_rotate(self: Path, mode: str) -> object:
        try:
            return open_file(self, mode)
        finally:
            if path.exists():
                path.replace(get_older_path(path))

    monkeypatch.setattr(Path, "open", open_and_rotate)
    assert read_span_lines(path, -math.inf, math.inf) == [span]


def test_a_full_disk_costs_spans_and_nothing_else(tmp_path: Path) -> None:
    paths = make_paths(tmp_path)
    log = SpanLog(paths.spans("trainer-trainer"))
    log.add(Span("train", NOW, NOW + 1))
    log._flush()
    with full_disk(1000):
        for number in range(100):
            log.add(Span("read", NOW + 2 * number, NOW + 2 * number + 1))
        log._flush()
        paths.metrics.write_text("training goes on\n")
    log.add(Span("publish", NOW + 900, NOW + 901))
    log.close()
    process = read_one(paths)
    assert (process.spans[0].name, process.spans[-1].name) == ("train", "publish")
    assert process.lost == 100


def test_silent_storage_holds_nobody_up(tmp_path: Path) -> None:
    """A pipe that nobody reads takes 64 KiB, and then blocks its writer."""
    paths = make_paths(tmp_path)
    path = paths.spans("trainer-trainer")
    os.mkfifo(path)
    log = SpanLog(path)
    for number in range(2 * MAX_PENDING_SPANS):
        log.add(Span("call", NOW + number, NOW + number + 0.5))
    log.close(timeout_s=0.1)
    assert len(log._pending) <= MAX_PENDING_SPANS


def test_of_a_long_file_the_part_that_is_asked_for_is_read(tmp_path: Path) -> None:
    paths = make_paths(tmp_path)
    path = paths.spans("cell-0-proxy")
    for start in range(3):
        at = NOW + 10_000 * start
        spans = [Span("call", at + shift, at + shift + 5, "replica 0") for shift in range(10_000)]
        append_lines(path, [ProcessStart(at, f"n0{start}", 7, at), *spans])
    with path.open("ab") as stream:
        stream.write(b'{"type":"span","na')
    whole = [span for process in read_spans(paths) for span in process.spans]
    assert len(whole) == 30_000
    (process,) = read_spans(paths, NOW + 15_000, NOW + 15_010)
    assert process.node == "n01"
    assert [*process.spans] == [
        span for span in whole if span.end >= NOW + 15_000 and span.begin <= NOW + 15_010
    ]
    assert len(read_span_lines(path, NOW + 15_000, NOW + 15_010)) < 3000
    assert len(read_span_lines(path, -math.inf, math.inf)) == 30_003


@pytest.fixture(autouse=True)
def _readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_readers", [])


def scrape(paths: RunPaths) -> dict[str, tuple[str, float]]:
    """Read type and value of each sample from the one target that Prometheus would find."""
    (target,) = json.loads(paths.prometheus_target("cell-0-driver").read_text())
    assert target["labels"] == {"run": "some/run", "job": "cell-0", "process": "driver"}
    (address,) = target["targets"]
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        families = [*text_string_to_metric_families(answer.read().decode())]
    return {one.name: (family.type, one.value) for family in families for one in family.samples}


def test_a_process_tells_its_own_numbers_and_those_of_its_role(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "some" / "run")
    rows = {"step": 1, "reward/mean": 0.5, "limit": "tools", "episodes_total": 7, "bad": None}

    def broken() -> Iterator[PrometheusSample]:
        yield PrometheusSample("areal_hpc_never", 1.0)
        raise OSError("no answer")

    register_sample_reader(lambda: build_samples("areal_hpc_driver", rows))
    register_sample_reader(broken)
    with serve_process_metrics(paths, "cell-0", "driver", "127.0.0.1"):
        samples = scrape(paths)
        rows["step"] = 2
        again = scrape(paths)
    assert samples["areal_hpc_driver_step"] == ("gauge", 1.0)
    assert samples["areal_hpc_driver_reward_mean"] == ("gauge", 0.5)
    assert samples["areal_hpc_driver_episodes_total"] == ("counter", 7.0)
    assert again["areal_hpc_driver_step"] == ("gauge", 2.0)
    assert samples["process_resident_memory_bytes"][1] > 1e6
    assert not [name for name in samples if "limit" in name or "bad" in name or "never" in name]
    assert not paths.prometheus_target("cell-0-driver").exists()


def test_a_port_that_others_reach_asks_for_the_key_of_the_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "some" / "run")
    with serve_process_metrics(paths, "cell-0", "driver", "localhost"):
        (target,) = json.loads(paths.prometheus_target("cell-0-driver").read_text())
        url = f"http://{target['targets'][0]}/metrics"
        assert httpx.get(url, trust_env=False).status_code == 401
        key = {"authorization": f"Bearer {paths.metrics_key.read_text().strip()}"}
        assert "process_resident_memory_bytes" in httpx.get(url, headers=key, trust_env=False).text
    assert paths.metrics_key.stat().st_mode & 0o777 == 0o600


def test_a_process_goes_on_unserved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = RunPaths(tmp_path)
    with serve_process_metrics(paths, "cell-0", "driver", "192.0.2.1"):  # an address of no machine
        pass
    assert "Prometheus cannot scrape this process" in caplog.text
    tmp_path.joinpath("prometheus").write_text("no folder")
    with serve_process_metrics(paths, "cell-0", "driver", "127.0.0.1"):
        pass
