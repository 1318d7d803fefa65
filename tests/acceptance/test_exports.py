"""6,400 recorded rows in ATIF and Parquet, read back by the formats' own readers and by pandas."""

import json
import os
import random
import sys
from pathlib import Path

import atif
import msgspec
import pytest
from pyarrow import parquet

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.reader import ShardReader
from areal_hpc.wire.trajectory import TrajectoryRow
from tests.support.commands import areal_hpc, run_program, said_by
from tests.support.environments import CHECKOUT
from tests.support.made_run import MadeEpisode, MadeRun

pytestmark = pytest.mark.timeout(900)

STEPS, EPISODES = 100, 64
READER = """
import json, sys
import pandas
import areal_hpc

frame = pandas.read_parquet(sys.argv[1])
own = areal_hpc.open_run(sys.argv[2]).trajectories.to_pandas()
joined = frame.merge(own, on=["ticket", "episode"], suffixes=("", "_own"))
print(json.dumps({
    "rows": len(frame),
    "tokens": [[int(one) for one in ids] for ids in frame["input_ids"]],
    "logprobs": [[float(one) for one in values] for values in frame["logprobs"]],
    "keys": frame[["ticket", "episode"]].values.tolist(),
    "steps": [int(step) for step in frame.groupby("step").reward.mean().index],
    "joined": len(joined),
    "differ": int((joined.reward != joined.reward_own).sum()),
}))
"""


def play(rng: random.Random, task: int) -> MadeEpisode:
    """An episode of one call, with as many tokens as it happens to have."""
    reply = [rng.randrange(10, 150_000) for _ in range(rng.randrange(1, 300))]
    return MadeEpisode(
        calls=1, call_tokens=len(reply), reply=reply, task=task, text=f"a {rng.random()}"
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    rng = random.Random(1)
    run = MadeRun(tmp_path_factory.mktemp("recorded"))
    for step in range(STEPS):
        run.add_step([play(rng, step * EPISODES + place) for place in range(EPISODES)])
    run.finish()
    return run.paths


def read_rows(run: RunPaths) -> dict[tuple[int, int], TrajectoryRow]:
    """What the shards hold, by ticket and episode."""
    found = [
        row
        for file in sorted(run.shards_dir.glob("*.h5"))
        for row in ShardReader(file).read_rows(range(EPISODES))
    ]
    return {(row.ticket_id, row.episode): row for row in found}


def export(run: RunPaths, file_format: str) -> Path:
    """Made on first use."""
    out = run.root / f"rows.{file_format}"
    if out.exists():
        return out
    said = said_by(
        areal_hpc(
            *("shards", "export", run.root, "--format", file_format, "--out", out), timeout_s=600
        )
    )
    assert f"{STEPS * EPISODES} rows" in said
    return out


def test_every_trajectory_is_valid_atif_with_the_tokens_of_its_row(recorded: RunPaths) -> None:
    rows = read_rows(recorded)
    for line in export(recorded, "atif").read_bytes().splitlines():
        found = atif.Trajectory.model_validate(msgspec.json.decode(line))
        assert found.extra
        row = rows.pop((found.extra["ticket"], found.extra["episode"]))
        (said,) = (one.metrics for one in found.steps if one.metrics)
        prompt, reply = said.prompt_token_ids or [], said.completion_token_ids or []
        assert prompt + reply == row.input_ids_T.tolist()
        assert said.logprobs == row.logprobs_T[len(prompt) :].tolist()
    assert not rows


def test_parquet_has_every_token_and_log_probability(recorded: RunPaths) -> None:
    rows = read_rows(recorded)
    for record in parquet.read_table(export(recorded, "parquet")).to_pylist():
        row = rows.pop((record["ticket"], record["episode"]))
        assert record["input_ids"] == row.input_ids_T.tolist()
        assert record["loss_mask"] == row.loss_mask_T.tolist()
        assert record["logprobs"] == row.logprobs_T.tolist()
    assert not rows


@pytest.fixture(scope="module")
def with_pandas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the Python of the tests has pandas as well."""
    folder = tmp_path_factory.mktemp("pandas")
    lock = CHECKOUT / "tests" / "locks" / "pandas.txt"
    wanted = ("--no-deps", "--require-hashes", "--target", folder, "-r", lock)
    install = ("install", "--quiet", *wanted)
    said_by(run_program(sys.executable, "-m", "pip", *install, timeout_s=600))
    known = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), known])}


def test_pandas_reads_parquet_and_the_columns_of_a_run(
    recorded: RunPaths, with_pandas: dict[str, str]
) -> None:
    rows = read_rows(recorded)
    words = (sys.executable, "-c", READER, export(recorded, "parquet"), recorded.root)
    found = json.loads(said_by(run_program(*words, environ=with_pandas, timeout_s=300)))
    assert found["rows"] == found["joined"] == len(rows)
    assert found["differ"] == 0
    assert found["steps"] == [*range(1, STEPS + 1)]
    for key, ids, logprobs in zip(found["keys"], found["tokens"], found["logprobs"], strict=True):
        row = rows.pop(tuple(key))
        assert ids == row.input_ids_T.tolist()
        assert logprobs == row.logprobs_T.tolist()
    assert not rows
