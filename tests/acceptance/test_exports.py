"""6,400 recorded rows in Parquet, and the columns of their run, read by pandas."""

import json
import os
import random
import sys
from pathlib import Path

import pytest

from areal_hpc.shards.reader import ShardReader
from tests.support.commands import areal_hpc, run_program, said_by
from tests.support.environments import CHECKOUT
from tests.support.made_run import MadeEpisode, MadeRun

STEPS, EPISODES = 100, 64
READER = """
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
    """An episode of one call, with as many tokens as it happens to have."""
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
        run.add_step([play(rng, step * EPISODES + place) for place in range(EPISODES)])
    run.finish()
    root, out = run.paths.root, tmp_path / "rows.parquet"
    command = ("shards", "export", root, "--format", "parquet", "--out", out)
    assert f"{STEPS * EPISODES} rows" in said_by(areal_hpc(*command, timeout_s=600))
    rows = {
        (row.ticket_id, row.episode): row
        for file in run.paths.shards_dir.glob("*.h5")
        for row in ShardReader(file).read_rows(range(EPISODES))
    }
    words = (sys.executable, "-c", READER, out, root)
    found = json.loads(said_by(run_program(*words, environ=with_pandas, timeout_s=300)))
    assert (found["joined"], found["differ"]) == (len(rows), 0)
    for key, ids, logprobs in zip(found["keys"], found["tokens"], found["logprobs"], strict=True):
        row = rows.pop(tuple(key))
        assert ids == row.input_ids_T.tolist()
        assert logprobs == row.logprobs_T.tolist()
    assert not rows
