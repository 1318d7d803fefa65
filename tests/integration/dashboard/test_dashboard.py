"""`areal-hpc view` and `report` show the server, index and file of complete and damaged runs."""

import asyncio
import base64
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.rundir.manifests import EvaluationResult, write_evaluation, write_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.token_annotations import RowAnnotation, StepAnnotations
from areal_hpc.view.dashboard.app import MEDIA_TYPE_BY_STATIC_FILE, DashboardApp, read_static_file
from areal_hpc.view.dashboard.report import write_report
from areal_hpc.view.transcripts.row_index import RowIndex
from areal_hpc.view.transcripts.row_search import RowQuery, find_rows
from areal_hpc.wire.ledger import NO_VERSION, BatchManifest, SealedTicket, TicketRef
from areal_hpc.wire.trajectory import RowKind, RowRecord
from tests.support.browser import serving_pages, start_view_server
from tests.support.commands import areal_hpc
from tests.support.dashboard_run import INJECTIONS, SECRET, append_step, make_run
from tests.support.deadlines import scaled
from tests.support.made_run import MadeEpisode, MadeRun
from tests.support.run_files import list_files
from tests.support.sample_trajectories import seal_in, trajectory
from tests.support.waiting import wait_for


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return make_run(tmp_path / "runs")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def url(run: RunPaths, environ: dict[str, str]) -> Iterator[str]:
    with serving_pages(run.root.parent.parent, environ) as address:
        yield address


def ask(url: str, page: str, **query: str) -> Any:
    answer = httpx.get(f"{url}data/{page}", params={"run": "shown/run", **query})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_pages_are_below_a_secret_and_files_are_never_named(url: str, run: RunPaths) -> None:
    root = url.rpartition("/")[0].rpartition("/")[0]
    assert url.startswith("http://127.0.0.1:")
    for path in ("", "/", "/data/runs", f"/{'x' * 32}/data/runs", "/index.html"):
        assert httpx.get(root + path).status_code == 401
    assert httpx.post(f"{url}data/runs").status_code == 405
    for path in ("recipe.yaml", "..%2f..%2fetc/passwd", "data/../recipe.yaml", "data/secret"):
        assert httpx.get(url + path).status_code == 404
    for query in ({"run": "../shown/run"}, {"run": "/etc"}, {"run": ""}):
        answer = httpx.get(f"{url}data/overview", params=query)
        assert (answer.status_code, "there is no run" in answer.text) == (400, True)
    for row in ("../recipe.yaml/0", "x.h5/0", "cell-0-000000.h5/99", "cell-0-000000.h5", "/" * 300):
        query = {"run": "shown/run", "row": row}
        assert httpx.get(f"{url}data/trajectory", params=query).status_code == 400
    assert httpx.get(f"{url}data/rows?run=shown/run&offset={'9' * 5000}").status_code == 400


def test_the_page_may_load_nothing_from_elsewhere_and_never_takes_text_for_markup(url: str) -> None:
    policy = httpx.get(url).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in MEDIA_TYPE_BY_STATIC_FILE:
        answer = httpx.get(url + name)
        assert answer.content == read_static_file(name)
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text), name
        banned = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|srcdoc"
        assert not re.search(banned, answer.text), name


def test_a_trace_is_downloaded_by_its_name_and_no_other_file_is(url: str, run: RunPaths) -> None:
    trace = run.profile(3, "trainer-0.trace.json.gz")
    trace.parent.mkdir(parents=True)
    trace.write_bytes(b"trace")
    (listed,) = ask(url, "summary")["profiles"]
    query = {"run": "shown/run", "file": listed["file"]}
    answer = httpx.get(f"{url}data/profile", params=query)
    assert (answer.content, listed["bytes"]) == (b"trace", 5)
    assert "step_00000003.trainer-0.trace.json.gz" in answer.headers["content-disposition"]
    for file in ("../recipe.yaml", "step_00000003/../../recipe.yaml", str(run.recipe), ""):
        answer = httpx.get(f"{url}data/profile", params=query | {"file": file})
        assert answer.status_code == 400


def test_rows_of_every_kind_are_shown_as_data(url: str, run: RunPaths) -> None:
    (failed,) = ask(url, "rows", where="kind=failed")["rows"]
    assert failed["cause"] == INJECTIONS[1]
    (hostile,) = ask(url, "rows", where="ticket=7")["rows"]
    shown = ask(url, "trajectory", row=f"{hostile['shard']}/{hostile['row']}")
    assert [message["text"] for message in shown["messages"][::2]] == list(INJECTIONS)
    (odd,) = ask(url, "rows", where="kind=auxiliary")["rows"]
    assert ask(url, "trajectory", row=f"{odd['shard']}/{odd['row']}")["messages"][0]["tool_calls"]
    (first,) = ask(url, "rows", where="ticket=1 and episode=0")["rows"]
    conversation = ask(url, "trajectory", row=f"{first['shard']}/{first['row']}")
    assert conversation["tokens"]["ids"] == [1000, 1001, 1002, 1003, 1004, 1005]
    assert conversation["tokens"]["versions"] == [None, None, None, "1.1", "1.1", "1.1"]
    assert conversation["messages"][1]["call"]["reward"]["parts"] == {"format": 0.25}
    texts = [message["text"] for message in conversation["messages"][-2:]]
    assert [first["question"], first["reply"]] == texts
    assert conversation["task_fields"] == {}, "its tasks are not here"
    tasks = [{"messages": [], "answer": "12", "rank": number} for number in range(9)]
    run.dataset("train").parent.mkdir(exist_ok=True)
    run.dataset("train").write_text("\n".join(map(json.dumps, tasks)))
    again = ask(url, "trajectory", row=f"{first['shard']}/{first['row']}")
    assert again["task_fields"] == {"answer": "12", "rank": str(conversation["task"])}
    assert [row["episode"] for row in conversation["group"]] == [0, 1]
    assert [row["ticket"] for row in conversation["task_rows"]] == [0, 2]
    assert ask(url, "failures")[0]["count"] == 1
    problem = httpx.get(f"{url}data/rows", params={"run": "shown/run", "where": "rewrad>0"})
    assert (problem.status_code, "rewrad" in problem.json()["error"]) == (400, True)


def test_tasks_of_other_evaluation_sets_are_not_the_same_task(tmp_path: Path) -> None:
    """Each set counts its tasks from 0, and a ticket names the set as well."""
    run = make_run(tmp_path / "runs")
    played = [(1, 5), (1, 10), (1_000_001, 5), (1_000_001, 10)]
    rows = [
        replace(trajectory(ticket, 0), kind=kind, eval_step=step, record=RowRecord(task_index=1))
        for kind in (RowKind.EVALUATION, RowKind.FAILED)
        for ticket, step in played
    ]
    trained_too = replace(trajectory(40, 0), kind=RowKind.FAILED, record=RowRecord(task_index=1))
    name = seal_in(run, [*rows, trained_too]).file
    with closing(RowIndex(run, tmp_path / "cache")) as index:
        index.index_new_rows()
        for position, kind in ((2, "evaluation"), (6, "failed")):
            related = index.select_related_rows(name, position)["task_rows"]
            assert [(row["kind"], row["ticket"], row["step"]) for row in related] == [
                (kind, 1_000_001, 10)
            ]


def test_what_training_did_is_shown_of_the_last_row_of_a_large_group_too(
    url: str, run: RunPaths
) -> None:
    rows = [trajectory(50, episode) for episode in range(201)]
    name, places = seal_in(run, rows).file, list(range(201))
    group = SealedTicket(TicketRef(50, 1), name, places, [0.0] * 201, NO_VERSION)
    write_manifest(run, BatchManifest(4, 1, [group]))
    run.annotation(4).parent.mkdir()
    annotation = RowAnnotation(shard=name, row=200, outcome="masked")
    content = StepAnnotations(step=4, generation=1, rows_of_batch=201, rows=[annotation])
    run.annotation(4).write_bytes(msgspec.msgpack.encode(content))
    shown = ask(url, "trajectory", row=f"{name}/200")["annotation"]
    assert (shown["step"], shown["outcome"]) == (4, "masked")


def test_evaluations_are_shown_by_set_step_and_task(url: str, run: RunPaths) -> None:
    assert ask(url, "evaluations") == {"sets": [], "problem": ""}
    metrics = {"metrics": ["avg@k", "pass@k", "cons@k"]}
    hard: dict[str, Any] = {"evaluation": {"sets": {"hard": metrics, "easy": {}}}}
    run.recipe.write_text(run.recipe.read_text() + yaml.safe_dump(hard))
    for step, rewards in ((0, [0.0, 0.0, 1.0, 0.5]), (8, [1.0, 1.0, 0.0, 0.5])):
        result = EvaluationResult(step, 4, sum(rewards) / 4, rewards, {}, 1)
        write_evaluation(run, "valid", result)
    further = EvaluationResult(8, 2, 0.5, [0.5, 0.5], {1: "no"}, 1, [[0, 1]] * 2)
    write_evaluation(run, "hard", further)
    valid, hard_page = ask(url, "evaluations")["sets"]
    assert (valid["name"], valid["steps"], valid["mean"]) == ("valid", [0, 8], [0.375, 0.625])
    assert valid["rewards"] == [[0.0, 0.0, 1.0, 0.5], [1.0, 1.0, 0.0, 0.5]]
    assert valid["low"][0] < 0.375 < valid["high"][0]
    compared = valid["compared"]
    assert (compared["from"], compared["to"], compared["difference"]) == (0, 8, 0.25)
    assert (compared["better"], compared["worse"]) == (2, 1)
    assert (compared["low"], compared["high"]) == (None, None), "four tasks show nothing"
    assert (hard_page["name"], hard_page["samples"], hard_page["failures"]) == ("hard", 2, [1])
    assert hard_page["first_ticket"] == 2_000_000, "of the sets in order: valid, easy, hard"
    assert hard_page["compared"] is None
    (passed,) = hard_page["further"]
    assert (passed["name"], passed["mean"]) == ("pass@2", [1.0]), "no sample has an answer"
    assert passed["low"][0] < passed["high"][0] == 1.0
    assert valid["further"] == []
    run.evaluation(9, "hard").write_text("{")
    damaged = ask(url, "evaluations")
    assert "step_9" in damaged["problem"] or "9.json" in damaged["problem"]
    assert [shown_set["name"] for shown_set in damaged["sets"]] == ["valid", "hard"]


def test_overview_and_metrics_say_what_the_files_say(url: str, run: RunPaths) -> None:
    append_step(run, 2, 0.5, generation=2, loss=float("nan"))
    overview = ask(url, "overview")
    assert [row["reward/mean"] for row in overview["steps"]] == [0.25, 0.5]
    assert overview["restarts"] == [2]
    assert overview["recipe"]["trainer.total_steps"] == "9"
    metrics = ask(url, "metrics")
    assert metrics["columns"]["reward/mean"] == [0.25, 0.5]
    assert "loss" not in metrics["columns"], "no step has a number"
    assert metrics["catalogue"]["time/step_s"]["unit"] == "s"
    damaged = RunPaths(run.root.with_name("other"))
    damaged.root.mkdir()
    damaged.recipe.write_text("[")
    other, line = ask(url, "runs")["runs"]
    assert "cannot be read" in other["problem"]
    assert (line["name"], line["step"], line["reward"]) == ("shown/run", 2, [0.25, 0.5])
    assert SECRET not in str(overview) + str(line)


def test_a_page_hears_of_a_new_step(url: str, run: RunPaths) -> None:
    with httpx.stream("GET", f"{url}live?run=shown/run", timeout=scaled(60)) as news:
        lines = news.iter_lines()
        assert next(lines) == "event: open"
        append_step(run, 2, 0.5)
        seal_in(run, [trajectory(30)], writer="cell-1")
        assert "event: change" in lines
    wait_for(lambda: ask(url, "rows")["total"] == 10)
    assert len(ask(url, "overview")["steps"]) == 2


def test_a_run_is_only_read(url: str, run: RunPaths) -> None:
    before = list_files(run.root)
    for page in ("runs", "overview", "summary", "metrics", "rows", "failures"):
        ask(url, page)
    assert list_files(run.root) == before


def test_the_port_stays_and_pages_are_for_their_user_alone(
    url: str, run: RunPaths, environ: dict[str, str]
) -> None:
    cache = Path(environ["XDG_CACHE_HOME"]) / "areal_hpc" / "dashboard"
    ask(url, "rows")
    assert {stat.S_IMODE(path.stat().st_mode) for path in cache.iterdir()} == {0o600}
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    port, secret = url.removeprefix("http://127.0.0.1:").strip("/").split("/")
    assert (cache / "port").read_text() == port
    assert not [path for path in cache.iterdir() if secret.encode() in path.read_bytes()]
    ended = areal_hpc("view", run.root, "--port", port, environ=environ)
    assert (ended.returncode, "in use" in ended.stderr) == (75, True)
    beyond = areal_hpc("view", run.root, "--port", 70000, environ=environ)
    assert (beyond.returncode, "70000 cannot be used" in beyond.stderr) == (75, True)


def test_two_indexes_of_one_run_agree_and_a_damaged_or_other_one_is_made_anew(
    run: RunPaths, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with closing(RowIndex(run, cache)) as index, closing(RowIndex(run, cache)) as other:
        assert (index.index_new_rows(), other.index_new_rows()) == (9, 0)
        seal_in(run, [trajectory(30)], writer="cell-1")
        assert other.index_new_rows() == 1
        assert index.find_page(offset=0, count=1).total == 10
    (file,) = cache.glob("*.sqlite")
    content = file.read_bytes()
    file.write_bytes(content[:6000] + b"x" * (len(content) - 6000))
    with closing(RowIndex(run, cache)) as again:
        again.index_new_rows()
        assert again.find_page(offset=0, count=1).total == 10
        for path in (*run.shards_dir.iterdir(), *run.shard_index_dir.iterdir()):
            path.unlink()
        seal_in(run, [trajectory(1)])
        again.index_new_rows()
        assert again.find_page(offset=0, count=1).total == 1, "another run is at this path now"
        with pytest.raises(RecipeError, match="no field"):
            again.find_page(sort_column="named; DROP TABLE rows", offset=0, count=1)


def test_a_cache_that_others_may_write_is_refused(run: RunPaths, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(ClusterError, match="open to other users"):
        RowIndex(run, tmp_path / "cache")


def test_ctrl_c_ends_a_server_whose_page_is_open(run: RunPaths, environ: dict[str, str]) -> None:
    server, url = start_view_server(run.root, environ)
    with httpx.stream("GET", f"{url}live", timeout=scaled(60)) as news:
        assert next(news.iter_lines()) == "event: open"
        server.send_signal(signal.SIGINT)
        output, _ = server.communicate(timeout=scaled(60))
    assert server.returncode == 0
    assert "Traceback" not in output


def test_steps_of_rows_come_from_the_batches_of_a_whole_run(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    for _ in range(12):
        run.add_step([MadeEpisode(reward=reward) for reward in (0.0, 1.0)])
    with closing(RowIndex(run.paths, tmp_path / "cache")) as index:
        index.index_new_rows()
        for where in ("step=3", "step>10 and reward>0"):
            matching = index.find_page(where, offset=0, count=1).matching
            assert matching == find_rows(run.paths.root, RowQuery(where))[1] > 0
        steps = {row["step"] for row in index.select_sample_rows(80) if row["kind"] == "train"}
        assert {1, 12} <= steps


def test_a_report_holds_the_pages_of_runs_in_one_private_file(
    run: RunPaths, tmp_path: Path, environ: dict[str, str]
) -> None:
    out = tmp_path / "report.html"
    launch = {"attempt": 1, "time": "2026-01-01T00:00:00+00:00", "command": [INJECTIONS[0]]}
    run.provenance.write_text(json.dumps({"launches": [launch]}))
    other = make_run(tmp_path / "others")
    ended = areal_hpc("report", run.root, other.root, "--out", out, environ=environ)
    assert ended.returncode == 0, ended.stderr
    assert "18 conversations" in ended.stdout
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    html = out.read_text()
    assert SECRET not in html
    assert not re.search(r'\b(src|href)="(?!data:,|#main)', html), "it loads nothing"
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', html)
    style, data, script = re.findall(r"<(?:style|script)[^>]*>(.*?)</(?:style|script)>", html, re.S)
    for kind, content in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    report = json.loads(data)
    assert [entry["name"] for entry in report["list"]["runs"]] == [str(run.root), str(other.root)]
    pages = report["runs"][str(run.root)]
    assert "trained_once=" in pages["summary"]["audit"][0]
    assert ["command", shlex.quote(INJECTIONS[0])] in pages["summary"]["launches"][0]
    assert len(pages["trajectories"]) == len(pages["rows"]["rows"]) == 9
    again = areal_hpc("report", run.root, "--out", out, environ=environ)
    assert (again.returncode, "exists" in again.stderr) == (78, True)


ROW = "cell-0-000000.h5/5"
"""Row of an evaluation."""
PAGES = (
    *("runs", "overview", "summary", "metrics", "evaluations", "timeline", "rows", "failures"),
    "trajectory",
)
BINARY = bytes(range(256)) * 20
OTHER_VERSION = "trainer: {total_steps: many}\nevaluation: 5\nmodel: 5\n"

RECIPE_PAGES = {"overview", "summary"}
DAMAGE: dict[str, tuple[Callable[[RunPaths], Any], set[str]]] = {
    # damage of the run, and the pages that can only report it
    "recipe cut": (lambda kept: kept.recipe.write_text("trainer: ["), RECIPE_PAGES),
    "recipe empty": (lambda kept: kept.recipe.write_text(""), RECIPE_PAGES),
    "recipe binary": (lambda kept: kept.recipe.write_bytes(BINARY), RECIPE_PAGES),
    "recipe of another version": (lambda kept: kept.recipe.write_text(OTHER_VERSION), {"overview"}),
    "metrics missing": (lambda kept: kept.metrics.unlink(), {"timeline"}),
    "metrics binary": (lambda kept: kept.metrics.write_bytes(BINARY), {"timeline"}),
    "metrics without steps": (
        lambda kept: kept.metrics.write_text('{"reward/mean": 1}\n'),
        {"overview", "summary", "metrics", "timeline"},
    ),
    "metrics of another version": (
        lambda kept: kept.metrics.write_text('{"step": 1}\n{"step": "two"}\n'),
        {"overview", "summary", "metrics", "timeline"},
    ),
    "spans binary": (lambda kept: write_spans(kept, BINARY), set()),
    "spans of another version": (lambda kept: write_spans(kept, b'[1]\n{}\n{"type":5}\n'), set()),
    "events binary": (lambda kept: kept.events.write_bytes(BINARY), set()),
    "shards missing": (lambda kept: remove(kept.shards_dir), {"trajectory"}),
    "shards and index missing": (
        lambda kept: remove(kept.shards_dir, kept.shard_index_dir),
        {"trajectory"},
    ),
}


def write_spans(kept: RunPaths, content: bytes) -> None:
    path = kept.spans("trainer-trainer")
    path.parent.mkdir()
    path.write_bytes(content)


def remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder)


@pytest.fixture
def kept(tmp_path: Path) -> RunPaths:
    kept = make_run(tmp_path / "runs")
    write_evaluation(kept, "valid", EvaluationResult(1, 2, 0.5, [0.0, 1.0], {}, 1))
    shutil.copytree(kept.root, kept.root.with_name("whole"))
    return kept


@pytest.mark.parametrize("damage", DAMAGE)
def test_pages_show_what_is_whole_and_name_what_is_not(
    damage: str, kept: RunPaths, tmp_path: Path
) -> None:
    act, broken_pages = DAMAGE[damage]
    act(kept)
    app = DashboardApp(tmp_path / "runs", SECRET, tmp_path / "cache")
    answers = asyncio.run(ask_all_pages(app))
    app.close()
    assert {page for page, answer in answers.items() if answer.status_code != 200} == broken_pages
    for page in broken_pages:
        assert set(answers[page].json()) == {"error"}, page
    damaged, other = answers["runs"].json()["runs"]
    assert (other["step"], "problem" in other) == (1, False), "others are shown all the same"
    assert ("problem" in damaged) == ("overview" in broken_pages)
    if "recipe" in damage:
        assert answers["trajectory"].json()["set"] == "valid"
        assert len(answers["rows"].json()["problems"]) == 1
        assert answers["evaluations"].json()["problem"]


async def ask_all_pages(app: DashboardApp) -> dict[str, httpx.Response]:
    """Request every page of data of the run `shown/run`."""
    address = f"http://pages/{SECRET}/data/"
    query = {"run": "shown/run", "row": ROW}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=address) as client:
        return {page: await client.get(page, params=query) for page in PAGES}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_report_has_what_is_whole_and_names_what_is_not(
    damage: str, kept: RunPaths, tmp_path: Path
) -> None:
    act, broken_pages = DAMAGE[damage]
    act(kept)
    out = tmp_path / "report.html"
    assert write_report([kept], out, tmp_path / "cache") == (0 if "shards" in damage else 9)
    data = re.search(r'id="report">(.*?)</script>', out.read_text())
    assert data
    pages = json.loads(data[1])["runs"]["shown/run"]
    errors = {page for page, content in pages.items() if "error" in content}
    assert errors == broken_pages - {"trajectory"}


def test_a_damaged_page_that_is_asked_for_again_is_logged_once(
    kept: RunPaths, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept.recipe.write_text(OTHER_VERSION)
    app = DashboardApp(tmp_path / "runs", SECRET, tmp_path / "cache")
    for _ in range(2):
        asyncio.run(ask_all_pages(app))
    app.close()
    logged = [entry for entry in caplog.records if entry.exc_info]
    assert sorted(entry.getMessage().split()[0] for entry in logged) == [
        str(kept.root),
        "data/overview",
    ]
