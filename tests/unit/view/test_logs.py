"""Logs of many processes as one stream."""

import shutil
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.logs import LogFollower, list_log_files, parse_log_records, read_last_lines


def make_run(place: Path) -> RunPaths:
    paths = RunPaths(place / "exp" / "one")
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
    told = [line.split()[-1] for file, line in lines if "restart" not in line]
    assert told == ["a", "b", "b", "c", "d", "e"]
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

    def found(*wanted: str) -> list[str]:
        return [file.process for file in list_log_files(paths, 1, wanted)]

    assert found("trainer") == ["trainer-0", "trainer-0"]
    assert found("cell-0/proxy") == ["proxy"]
    assert found("proxy", "trainer-0") == ["proxy", "trainer-0", "trainer-0"]
    assert found("nobody") == []


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
