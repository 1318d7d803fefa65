"""A rank that hangs, as the one that waits for it tells: real processes over gloo."""

import subprocess
import sys
from pathlib import Path

from tests.support.environments import CHECKOUT

RANK = """
import logging, sys, time
from datetime import timedelta

import torch.distributed as dist

from areal_hpc.errors import LostPeerError
from areal_hpc.trainer.collectives import is_true_on_any_rank, raise_if_peer_lost
from areal_hpc.trainer.rank_progress import RankProgress, enter_place, note_detail, watch_ranks

logging.basicConfig(stream=sys.stderr)
rank, path = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(path, 2)
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=6)
)
watch_ranks(RankProgress(store, rank, 2, hang_s=1.0, look_s=0.1))
enter_place("forward passes")

def hang():
    note_detail("forward of micro-batch 2")
    time.sleep(60)

if rank == 1:
    hang()
enter_place("the optimizer's step")
try:
    is_true_on_any_rank(False)
except RuntimeError as error:
    try:
        raise_if_peer_lost(error)
    except LostPeerError as lost:
        print(lost.problems[0].message, flush=True)
"""


def test_the_rank_that_waits_names_the_one_that_hangs_and_where(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    meeting = str(tmp_path / "store")
    with subprocess.Popen(
        [*command, "1", meeting], cwd=CHECKOUT, stderr=subprocess.PIPE, text=True
    ) as hanging:
        waiting = subprocess.run(
            [*command, "0", meeting], cwd=CHECKOUT, capture_output=True, text=True, check=True
        )
        hanging.kill()
        assert hanging.stderr is not None
        stacks = hanging.stderr.read()
    said = "behind all others: rank 1 at forward passes, forward of micro-batch 2 for "
    assert f"a trainer rank hangs: {said}" in waiting.stdout
    assert f"the trainer stands still: {said}" in waiting.stderr
    assert "in hang" in stacks, "its stack, in its own log"
