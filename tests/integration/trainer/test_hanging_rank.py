"""A rank that hangs, as the one that waits for it tells: real processes over gloo."""

import subprocess
import sys
from pathlib import Path

from areal_hpc.errors import LostTrainerRankError
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT

RANK = """
import logging, sys, time
from datetime import timedelta

import torch.distributed as dist

from areal_hpc.errors import LostTrainerRankError
from areal_hpc.jobs.processes.native_call_threads import (
    exit_beside_native_calls, note_library_threads
)
from areal_hpc.trainer.collectives import is_true_on_any_rank, raise_for_lost_rank
from areal_hpc.trainer.rank_progress import RankProgress, note_detail, note_place_reached
from tests.support.deadlines import Deadline, scaled

logging.basicConfig(stream=sys.stderr)
rank, path = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(path, 2)
store.add("imported", 1)
deadline = Deadline(60)
while store.add("imported", 0) < 2:  # which takes as long as the machine likes
    assert not deadline.is_over(), "the other rank did not come"
    time.sleep(0.05)
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=scaled(6))
)

def hang():
    note_detail("forward of micro-batch 2")
    time.sleep(600)  # until it is killed

def work():
    note_place_reached("forward passes")
    if rank == 1:
        hang()
    note_place_reached("the optimizer's step")
    try:
        is_true_on_any_rank(False)
    except RuntimeError as error:
        raise_for_lost_rank(error)

progress = RankProgress(store, rank, 2, hang_s=scaled(1.0), check_interval_s=0.1)
with exit_beside_native_calls():
    try:
        note_library_threads("torch.distributed")
        with progress.watch():
            work()
    except LostTrainerRankError as lost:
        print(lost.problems[0].message, flush=True)
        sys.exit(lost.exit_code)
"""


def test_the_rank_that_waits_names_the_one_that_hangs_and_where(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    meeting = str(tmp_path / "store")
    with subprocess.Popen(
        [*command, "1", meeting], cwd=CHECKOUT, stderr=subprocess.PIPE, text=True
    ) as hanging:
        try:
            waiting = subprocess.run(
                [*command, "0", meeting],
                cwd=CHECKOUT,
                capture_output=True,
                text=True,
                timeout=scaled(120),
            )
        finally:
            hanging.kill()  # else the end of this block would wait until it has slept
        assert hanging.stderr is not None
        stacks = hanging.stderr.read()
    assert waiting.returncode == LostTrainerRankError.exit_code, waiting.stderr + stacks
    said = "behind all others: rank 1 at forward passes, forward of micro-batch 2 for "
    assert f"a trainer rank hangs: {said}" in waiting.stdout
    assert f"the trainer stands still: {said}" in waiting.stderr
    assert "in hang" in stacks, "its stack, in its own log"
