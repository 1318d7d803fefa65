"""Coverage of a run's time by spans; its data in Prometheus, pandas, TensorBoard and wandb.

wandb comes from its own lock and is read back offline.
"""

import json
import os
import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.metrics.writer import format_tensorboard_tag
from areal_hpc.rundir.checkpoints import list_checkpoints
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.span_reader import ProcessSpans, read_spans
from areal_hpc.shards.index import read_index
from areal_hpc.shards.reader import ShardReader
from areal_hpc.view.timeline import EPISODES_LANE
from tests.support.commands import areal_hpc, run_program, said_by, start_areal_hpc
from tests.support.environments import CHECKOUT
from tests.support.killed_run import random_model
from tests.support.made_run import MadeEpisode, MadeRun
from tests.support.small_run import LIGHT, SmallRun, interrupted_at_end, kill_all, started_from
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(900)

MAX_ERROR_S = 0.05
MIN_COVERED = 0.95


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    folder = tmp_path_factory.mktemp("timeline")
    further = ("inference.cells=2", "trainer.parallel.dp=2", "trainer.total_steps=6")
    small = SmallRun(folder / "runs", *LIGHT, *further)
    small.finish()
    return small.paths


def compute_covered_share(process: ProcessSpans) -> float:
    """Compute the share of a process's time that spans cover."""
    covered, at = 0.0, process.begin
    for span in process.spans:
        covered += max(0.0, span.end - max(at, span.begin))
        at = max(at, span.end)
    return covered / (process.end - process.begin)


def test_spans_cover_each_processs_time(run: RunPaths) -> None:
    processes = {process.name: process for process in read_spans(run)}
    assert processes.keys() == {
        *("sft-sft-0", "sft-sft-1", "trainer-ledger-0", "trainer-trainer-0", "trainer-trainer-1"),
        *(f"cell-{cell}-{role}" for cell in (0, 1) for role in ("inference", "proxy", "driver")),
    }
    covered = {name: compute_covered_share(process) for name, process in processes.items()}
    assert min(covered.values()) >= MIN_COVERED, covered
    assert sum(process.lost for process in processes.values()) == 0


def test_replicas_are_updated_while_the_trainer_publishes(run: RunPaths) -> None:
    processes = {process.name: process for process in read_spans(run)}
    published = [span for span in processes["trainer-trainer-0"].spans if span.name == "publish"]
    updates = [span for span in processes["cell-1-inference"].spans if span.name == "weight update"]
    assert len(updates) >= 6
    for update in updates:
        assert any(
            span.begin - MAX_ERROR_S <= update.begin and update.end <= span.end + MAX_ERROR_S
            for span in published
        )


def test_episodes_are_those_of_the_shards(run: RunPaths) -> None:
    processes = {process.name: process for process in read_spans(run)}
    for cell in ("cell-0", "cell-1"):
        records = list(list_records(run, cell))
        assert records
        spans = {span[0]: span[1:] for span in list_episodes(processes[f"{cell}-driver"])}
        for key, began_at, ended_at in records:
            begin, end = spans[key]
            assert begin - MAX_ERROR_S < began_at
            assert ended_at < end + MAX_ERROR_S


def list_records(run: RunPaths, cell: str) -> Iterator[tuple[tuple[int, int], float, float]]:
    """Ticket and episode of each trained row, with its times."""
    for sealed in read_index(run.shard_index_dir, cell):
        reader = ShardReader(run.shards_dir / sealed.file)
        rows = [row for ticket in sealed.tickets for row in ticket.rows]
        for row in reader.read_rows(rows):
            yield (row.ticket_id, row.episode), row.record.started_at, row.record.ended_at


def list_episodes(driver: ProcessSpans) -> Iterator[tuple[tuple[int, int], float, float]]:
    for span in driver.spans:
        if span.lane == EPISODES_LANE and span.facts["eval_step"] < 0:
            yield (span.facts["ticket_id"], span.facts["episode"]), span.begin, span.end


EXPECTED_BY_PROCESS = {
    "trainer": {"areal_hpc_trainer_step", "areal_hpc_trainer_reward_mean"},
    "ledger": {"areal_hpc_ledger_tickets_trained", "areal_hpc_ledger_published_step"},
    "driver": {"areal_hpc_driver_episodes_ended_total", "areal_hpc_driver_tickets_held"},
    "proxy": {"areal_hpc_proxy_prompts_total", "areal_hpc_proxy_sessions"},
    "inference": {"areal_hpc_replica_serving", "sglang:num_running_reqs"},
}


def scrape(run: SmallRun) -> dict[str, dict[str, float]]:
    metrics: dict[str, dict[str, float]] = {}
    for path in run.paths.prometheus_dir.glob("*.json"):
        (target,) = json.loads(path.read_text())
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=10) as answer:
            families = [*text_string_to_metric_families(answer.read().decode())]
        samples = {sample.name: sample.value for family in families for sample in family.samples}
        metrics.setdefault(target["labels"]["process"].split("-")[0], {}).update(samples)
    return metrics


def is_complete(run: SmallRun) -> bool:
    try:
        metrics = scrape(run)
    except (OSError, ValueError):  # a process that has just started, or ended
        return False
    return all(names <= metrics.get(name, {}).keys() for name, names in EXPECTED_BY_PROCESS.items())


def test_every_process_of_a_run_can_be_scraped(tmp_path: Path) -> None:
    run = SmallRun(
        tmp_path / "runs",
        *started_from(random_model(tmp_path / "model")),
        "cluster.prometheus=true",
        "trainer.total_steps=100000",
        "evaluation.every_steps=0",
    )
    with interrupted_at_end(run):
        run.start()
        wait_for(lambda: is_complete(run), 600.0)
        metrics = scrape(run)
    assert metrics["trainer"]["areal_hpc_trainer_step"] >= 1
    assert metrics["ledger"]["areal_hpc_ledger_tickets_trained"] >= 4
    assert metrics["driver"]["areal_hpc_driver_episodes_ended_total"] >= 16
    assert metrics["proxy"]["areal_hpc_proxy_prompts_total"] >= 0
    assert metrics["inference"]["areal_hpc_replica_serving"] == 1
    assert all(values["process_cpu_seconds_total"] > 0 for values in metrics.values())
    secret = run.paths.service_key.read_text()
    assert secret.split("\n")[1] not in json.dumps(metrics)
    assert not [*run.paths.prometheus_dir.glob("*.json")]


STEPS, EPISODES = 100, 64
PANDAS_READER = """
import json, sys
import pandas
import areal_hpc

frame = pandas.read_parquet(sys.argv[1])
own = areal_hpc.open_run(sys.argv[2]).trajectories.to_pandas()
joined = frame.merge(own, on=["ticket", "episode"], suffixes=("", "_own"))
print(json.dumps({
    "tokens": [[int(one) for one in ids] for ids in frame["input_ids"]],
    "logprobs": [[float(one) for one in values] for values in frame["logprobs"]],
    "keys": frame[["ticket", "episode"]].values.tolist(),
    "joined": len(joined),
    "differ": int((joined.reward != joined.reward_own).sum()),
}))
"""


def play(rng: random.Random, task: int) -> MadeEpisode:
    """Make an episode of one call with a random number of tokens."""
    reply = [rng.randrange(10, 150_000) for _ in range(rng.randrange(1, 300))]
    return MadeEpisode(
        calls=1, call_tokens=len(reply), reply=reply, task=task, text=f"a {rng.random()}"
    )


@pytest.fixture
def with_pandas(tmp_path: Path) -> dict[str, str]:
    """An environment in which the Python of the tests has pandas as well."""
    folder, lock = tmp_path / "pandas", CHECKOUT / "tests" / "locks" / "pandas.txt"
    wanted = ("--no-deps", "--require-hashes", "--target", folder, "-r", lock)
    install = ("install", "--quiet", *wanted)
    said_by(run_program(sys.executable, "-m", "pip", *install, timeout_s=600))
    known = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), known])}


@pytest.mark.timeout(900)
def test_pandas_reads_parquet_and_the_columns_of_a_run(
    with_pandas: dict[str, str], tmp_path: Path
) -> None:
    rng, run = random.Random(1), MadeRun(tmp_path / "runs")
    for step in range(STEPS):
        run.add_step([play(rng, step * EPISODES + index) for index in range(EPISODES)])
    run.finish()
    root, out = run.paths.root, tmp_path / "rows.parquet"
    command = ("shards", "export", root, "--format", "parquet", "--out", out)
    assert f"{STEPS * EPISODES} rows" in said_by(areal_hpc(*command, timeout_s=600))
    rows = {
        (row.ticket_id, row.episode): row
        for file in run.paths.shards_dir.glob("*.h5")
        for row in ShardReader(file).read_rows(range(EPISODES))
    }
    words = (sys.executable, "-c", PANDAS_READER, out, root)
    table = json.loads(said_by(run_program(*words, environ=with_pandas, timeout_s=300)))
    assert (table["joined"], table["differ"]) == (len(rows), 0)
    for key, ids, logprobs in zip(table["keys"], table["tokens"], table["logprobs"], strict=True):
        row = rows.pop(tuple(key))
        assert ids == row.input_ids_T.tolist()
        assert logprobs == row.logprobs_T.tolist()
    assert not rows


READER = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2

def read_records(path):
    # wandb's own file: a header, then a LevelDB log of its messages in blocks of 32 KiB.
    data, at, message = open(path, "rb").read(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:
            break
        message, at = message + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(message)
            message = b""

for record in read_records(sys.argv[1]):
    kind = record.WhichOneof("record_type")
    if kind == "run":
        print(json.dumps({"id": record.run.run_id, "project": record.run.project}))
    if kind == "history":
        items = record.history.item
        row = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in items}
        print(json.dumps({"row": {k: v for k, v in row.items() if k[0] != "_"}}))
"""


@pytest.fixture(scope="module")
def wandb_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("wandb")
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    python = home / "bin" / "python"
    lock = CHECKOUT / "requirements" / "wandb.txt"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "-r", lock)
    said_by(run_program(python, *install, timeout_s=600))
    return python


def read_offline_runs(paths: RunPaths, python: Path) -> Iterator[dict[str, Any]]:
    for part in paths.tracker("wandb").list_parts():
        (file,) = part.glob("wandb/offline-run-*/run-*.wandb")
        for line in said_by(run_program(python, "-c", READER, file)).splitlines():
            yield json.loads(line)


def read_wandb_rows(paths: RunPaths, python: Path, project: str) -> dict[int, dict[str, Any]]:
    """Merge all parts by step; they must be of one run and have no value twice."""
    records = list(read_offline_runs(paths, python))
    heads = [record for record in records if "id" in record]
    assert {head["id"] for head in heads} == {paths.tracker("wandb").run_id.read_text()}
    assert {head["project"] for head in heads} == {project}
    merged: dict[int, dict[str, Any]] = {}
    for record in records:
        if "row" in record:
            held = merged.setdefault(record["row"]["step"], {})
            assert not (held.keys() & record["row"].keys()) - {"step"}, "a metric of a step twice"
            held |= record["row"]
    return merged


def read_tensorboard_rows(paths: RunPaths) -> dict[int, dict[str, float]]:
    """Read rows by step with TensorBoard's own reader; refuse a value twice."""
    board = EventAccumulator(str(paths.tensorboard_run_dir), size_guidance={"scalars": 0})
    board.Reload()
    rows: dict[int, dict[str, float]] = {}
    for tag in board.Tags()["scalars"]:
        for event in board.Scalars(tag):
            row = rows.setdefault(event.step, {})
            assert tag not in row, f"{tag} of step {event.step} twice"
            row[tag] = event.value
    return rows


def kill_with_children(process: subprocess.Popen[str]) -> None:
    for member in (*psutil.Process(process.pid).children(recursive=True), process):
        member.kill()
    process.communicate(timeout=60)


def test_a_run_that_was_killed_is_one_run_in_both_trackers_and_no_step_is_there_twice(
    wandb_python: Path, tmp_path: Path
) -> None:
    save_every = 5
    run = SmallRun(
        *(tmp_path / "runs", *LIGHT, "trainer.total_steps=5000"),
        *(f"trainer.checkpoint_every_steps={save_every}", "evaluation.every_steps=5"),
    )
    command = ("sync", run.paths.root, "--python", wandb_python, "--project", "killed")

    def list_steps() -> list[int]:
        return [row["step"] for row in read_metrics(run.paths.metrics)]

    def is_between_checkpoints() -> bool:
        """Check for steps in the metrics that no checkpoint has, and for a part of wandb."""
        saved = [
            checkpoint.state.step for checkpoint in list_checkpoints(run.paths.checkpoints_dir)
        ]
        parts = run.paths.tracker("wandb").list_parts()
        return bool(parts and saved) and max(list_steps()) >= max(saved) + 2

    with interrupted_at_end(run):
        run.start()
        run.await_true(run.paths.metrics.exists)
        follower = start_areal_hpc(*command, "--follow", environ=os.environ)
        try:
            run.await_true(is_between_checkpoints)
            assert run.process is not None
            kill_all(run.process, run.paths.root)
        finally:
            kill_with_children(follower)
    known = list_steps()[-1]
    kept = max(checkpoint.state.step for checkpoint in list_checkpoints(run.paths.checkpoints_dir))
    assert kept < known, "steps are trained again"
    steps = known + save_every
    run.override(f"trainer.total_steps={steps}")
    run.finish()
    said_by(areal_hpc(*command))
    rows = read_metrics(run.paths.metrics)
    assert [row["step"] for row in rows] == [*range(steps + 1)]
    assert len(run.paths.tracker("wandb").list_parts()) >= 2
    numbers = {
        row["step"]: {name: value for name, value in row.items() if isinstance(value, int | float)}
        for row in rows
    }
    assert read_wandb_rows(run.paths, wandb_python, "killed") == numbers
    board = read_tensorboard_rows(run.paths)
    assert len([*run.paths.tensorboard_run_dir.glob("events.out.tfevents.*")]) >= 2, (
        "a file a start"
    )
    assert board.keys() == numbers.keys()
    for step, row in numbers.items():
        expected = {format_tensorboard_tag(name): value for name, value in row.items()}
        del expected["step"]
        assert board[step] == pytest.approx(expected, rel=1e-6), "float32"
