"""`areal-hpc sync` gives a user's tracker each step once, after any kill."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_hpc.cli import explain
from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.rundir.checkpoints import COMPLETE_MARKER_FILE, TrainerState, write_trainer_state
from areal_hpc.rundir.jsonl import append_line, read_readable_records
from areal_hpc.rundir.paths import RunPaths, format_step_dir
from areal_hpc.view.sync import (
    MAX_PART_ROWS,
    TrackerChoice,
    choose_tracker,
    write_tracker_parts,
)
from tests.support.commands import areal_hpc, exit_code_of
from tests.support.json_server import JsonHandler, serving_http
from tests.support.recorded_run import write_recipe

TRACKER = """
import json, os, pathlib, sys
part = json.load(sys.stdin)
out = pathlib.Path(sys.argv[1], "logged.jsonl")
out.write_text("".join(json.dumps({"id": part["id"], **row}) + "\\n" for row in part["rows"]))
flag = pathlib.Path(__file__).with_name("kill")
if flag.exists():
    flag.unlink()
    os.kill(os.getppid(), 9)
"""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "experiment" / "trial")
    paths.root.mkdir(parents=True)
    write_recipe(paths, {"device": "cpu", "dtype": "float32"})
    return paths


@pytest.fixture
def tracker(tmp_path: Path) -> TrackerChoice:
    program = tmp_path / "mine.py"
    program.write_text(TRACKER)
    return choose_tracker(str(program), sys.executable, "")


def train_to(paths: RunPaths, step: int, *, saved: int) -> None:
    before = max((row["step"] for row in read_readable_records(paths.metrics)), default=-1)
    for number in range(before + 1, step + 1):
        append_line(paths.metrics, {"step": number, "loss": float(number)})
    folder = paths.checkpoints_dir / format_step_dir(saved)
    folder.mkdir(parents=True, exist_ok=True)
    write_trainer_state(folder, TrainerState(step=saved, seed=1))
    (folder / COMPLETE_MARKER_FILE).touch()


def logged(paths: RunPaths) -> list[dict[str, Any]]:
    return [
        row
        for part in paths.tracker("mine").list_parts()
        for row in read_readable_records(part / "logged.jsonl")
    ]


def test_each_step_is_written_once_when_no_resume_can_take_it_back(
    paths: RunPaths, tracker: TrackerChoice
) -> None:
    assert write_tracker_parts(paths, tracker) == 0
    train_to(paths, 5, saved=4)
    assert write_tracker_parts(paths, tracker) == 4
    assert write_tracker_parts(paths, tracker) == 0
    append_line(paths.metrics, {"step": 2, "eval/reward": 0.5})  # an evaluation that ended late
    train_to(paths, 8, saved=4)
    assert write_tracker_parts(paths, tracker) == 1
    paths.finished_marker.touch()
    assert write_tracker_parts(paths, tracker) == 5
    rows = logged(paths)
    (run_id,) = {row.pop("id") for row in rows}
    assert len(run_id) == 8
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert losses == [(step, float(step)) for step in range(len(losses))]
    assert [row for row in rows if "loss" not in row] == [{"step": 2, "eval/reward": 0.5}]


def test_a_late_checkpoint_of_a_trainer_that_was_replaced_settles_nothing(
    paths: RunPaths, tracker: TrackerChoice
) -> None:
    """The first trainer completes step 9 after the second one resumed from step 4."""
    train_to(paths, 8, saved=9)
    folder = paths.checkpoints_dir / format_step_dir(4)
    folder.mkdir()
    write_trainer_state(folder, TrainerState(step=4, generation=2, seed=1))
    (folder / COMPLETE_MARKER_FILE).touch()
    assert write_tracker_parts(paths, tracker) == 4


def test_a_sync_that_was_killed_leaves_no_step_out_and_none_twice(
    paths: RunPaths, tracker: TrackerChoice
) -> None:
    train_to(paths, 3, saved=2)
    write_tracker_parts(paths, tracker)
    paths.finished_marker.touch()
    tracker.program.with_name("kill").touch()
    command = ("sync", paths.root, "--tracker", tracker.program)
    assert areal_hpc(*command).returncode == -signal.SIGKILL
    assert [row["step"] for row in logged(paths)] == [0, 1]
    again = areal_hpc(*command)
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in logged(paths)] == [0, 1, 2, 3]
    assert len({row["id"] for row in logged(paths)}) == 1


def test_following_ends_with_the_run(paths: RunPaths, tracker: TrackerChoice) -> None:
    train_to(paths, 3, saved=2)
    paths.finished_marker.touch()
    ended = areal_hpc("sync", paths.root, "--tracker", tracker.program, "--follow")
    assert ended.returncode == 0, ended.stderr
    assert len(logged(paths)) == 4


def test_following_goes_on_after_a_program_failed_and_says_it_once(
    paths: RunPaths,
    tracker: TrackerChoice,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = tracker.program.with_name("failed")
    hiccup = f"import pathlib\nfailed = pathlib.Path({str(failed)!r})\n"
    hiccup += "tries = len(failed.read_text()) if failed.exists() else 0\n"
    hiccup += (
        "if tries < 3:\n    failed.write_text('x' * (tries + 1))\n    raise SystemExit('away')\n"
    )
    tracker.program.write_text(hiccup + TRACKER)
    train_to(paths, 3, saved=2)
    paths.finished_marker.touch()
    monkeypatch.setattr(explain, "FOLLOW_PERIOD_S", 0.1)
    assert exit_code_of("sync", paths.root, "--tracker", tracker.program, "--follow") == 0
    assert capsys.readouterr().err.count("exit code 1: away") == 1
    assert [row["step"] for row in logged(paths)] == [0, 1, 2, 3]


def test_a_long_run_is_written_in_parts_of_bounded_size(
    paths: RunPaths, tracker: TrackerChoice
) -> None:
    train_to(paths, MAX_PART_ROWS, saved=1)
    paths.finished_marker.touch()
    assert write_tracker_parts(paths, tracker) == MAX_PART_ROWS + 1
    assert len(paths.tracker("mine").list_parts()) == 2
    assert [row["step"] for row in logged(paths)] == [*range(MAX_PART_ROWS + 1)]


def test_a_tracker_gets_the_recipe_without_secrets(paths: RunPaths, tmp_path: Path) -> None:
    program = tmp_path / "kept.py"
    program.write_text(
        "import pathlib, sys\npathlib.Path(sys.argv[1], 'got').write_text(sys.stdin.read())\n"
    )
    recipe = yaml.safe_load(paths.recipe.read_text())
    recipe["rollout"]["workflow_kwargs"] = {"key": "a secret"}
    paths.recipe.write_text(yaml.safe_dump(recipe))
    train_to(paths, 3, saved=2)
    write_tracker_parts(paths, TrackerChoice("kept", program, sys.executable, "mine"))
    (part,) = paths.tracker("kept").list_parts()
    record = json.loads((part / "got").read_text())
    assert (record["name"], record["project"]) == ("experiment/trial", "mine")
    assert record["config"]["trainer"]["device"] == "cpu"
    assert "a secret" not in json.dumps(record)


def test_what_fails_says_why_and_writes_nothing(paths: RunPaths, tmp_path: Path) -> None:
    train_to(paths, 3, saved=2)
    program = tmp_path / "broken.py"
    choice = TrackerChoice("broken", program, sys.executable)
    program.write_text("import no_such_tracker\n")
    with pytest.raises(RecipeError, match="no_such_tracker"):
        write_tracker_parts(paths, choice)
    program.write_text("raise SystemExit('the disk is full')\n")
    with pytest.raises(ClusterError, match="the disk is full"):
        write_tracker_parts(paths, choice)
    assert paths.tracker("broken").list_parts() == []
    with pytest.raises(RecipeError, match="expected wandb"):
        choose_tracker("swanlab", sys.executable, "")


def write_spans(paths: RunPaths) -> None:
    lines = [
        {"type": "process", "at": 100.0, "node": "n01", "pid": 7, "began_at": 100.0},
        {"type": "span", "name": "train", "begin": 101.0, "end": 104.0, "facts": {"rows": 3}},
        {"type": "span", "name": "checkpoint", "begin": 108.0, "end": 114.0},
    ]
    paths.spans_dir.mkdir()
    paths.spans("trainer-trainer").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, end in ((1, 110.0), (2, 120.0)):
        append_line(paths.metrics, {"step": step, "loss": step / 4, "unix_time_s": end})
    paths.finished_marker.touch()


def test_metrics_and_spans_leave_by_otlp_where_the_standard_variables_point(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_spans(paths)
    received: list[tuple[str, str | None, Any]] = []

    class Collector(JsonHandler):
        def post(self, content: bytes) -> None:
            received.append((self.path, self.headers["x-team"], json.loads(content)))
            self.answer(200, {"partialSuccess": {}})

    with serving_http(Collector) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{url}/otlp/")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=a%20b,other=1")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
        for rows in ("2 new rows", "0 new rows", "1 new rows"):
            ended = areal_hpc("sync", paths.root, "--tracker", "otlp")
            assert rows in ended.stdout, ended.stderr
            if rows == "0 new rows":
                append_line(paths.metrics, {"step": 1, "eval/reward": 0.5})
    assert {(path, team) for path, team, _ in received} == {
        ("/otlp/v1/metrics", "a b"),
        ("/otlp/v1/traces", "a b"),
    }
    points = {
        (metric["name"], int(point["timeUnixNano"]) / 1e9): point["asDouble"]
        for _, _, body in received
        for resource in body.get("resourceMetrics", [])
        for metric in resource["scopeMetrics"][0]["metrics"]
        for point in metric["gauge"]["dataPoints"]
    }
    assert points == {
        **{("areal_hpc.step", 110.0): 1, ("areal_hpc.loss", 110.0): 0.25},
        **{("areal_hpc.step", 120.0): 2, ("areal_hpc.loss", 120.0): 0.5},
        ("areal_hpc.eval/reward", 110.0): 0.5,
    }
    traces = [body["resourceSpans"] for path, _, body in received if path.endswith("traces")]
    spans = [
        [(span["name"], get_s(span, "start"), get_s(span, "end")) for span in list_spans(resources)]
        for resources in traces
    ]
    assert spans == [
        [("step 1", 101, 110), ("train", 101, 104), ("checkpoint", 108, 110)],
        [("step 2", 110, 120), ("checkpoint", 110, 114)],
    ]
    root, train, _ = list_spans(traces[0])
    assert (train["traceId"], train["parentSpanId"]) == (root["traceId"], root["spanId"])
    assert (len(root["traceId"]), len(root["spanId"])) == (32, 16)
    assert {"key": "rows", "value": {"intValue": "3"}} in train["attributes"]
    names = {item["key"]: item["value"] for item in traces[0][1]["resource"]["attributes"]}
    assert names["service.name"] == {"stringValue": "ours"}
    assert names["service.instance.id"] == {"stringValue": "trainer-trainer"}


def list_spans(resources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [span for resource in resources for span in resource["scopeSpans"][0]["spans"]]


def get_s(span: dict[str, Any], which: str) -> float:
    return int(span[f"{which}TimeUnixNano"]) / 1e9


def test_a_collector_that_refuses_costs_no_row(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_spans(paths)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    ended = areal_hpc("sync", paths.root, "--tracker", "otlp")
    assert (ended.returncode, "OTEL_EXPORTER_OTLP_ENDPOINT is not set" in ended.stderr) == (
        75,
        True,
    )
    with serving_http(JsonHandler) as url:  # which answers 404
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        ended = areal_hpc("sync", paths.root, "--tracker", "otlp")
        assert (ended.returncode, "404 Not Found" in ended.stderr) == (75, True)
    assert paths.tracker("otlp").list_parts() == []
