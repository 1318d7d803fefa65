"""Deadlines of the trainer's end of a process group; the other end is a plain process or absent."""

import subprocess
import sys
import time

import pytest
import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.transports.process_group import UpdateProcessGroup

SOON_S = 30.0
"""No wait of torch's own is as short."""
PEER = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
print("imported", flush=True)
name, port = input().split()
store = c10d.PrefixStore(name, dist.TCPStore("127.0.0.1", int(port), 2, False))
group, _ = c10d._new_process_group_helper(
    2, 1, [], c10d.Backend("gloo"), store, group_name=name, timeout=timedelta(seconds=30)
)
time.sleep(60)
"""


def test_a_group_that_nobody_joins_is_given_up_in_time() -> None:
    group = UpdateProcessGroup("lonely", "127.0.0.1", 2, "gloo", timeout_s=0.3)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="did not form"):
        group.join(lambda: False)
    assert time.monotonic() - began < SOON_S
    group.abandon()


def test_a_refusal_ends_the_wait_at_once() -> None:
    group = UpdateProcessGroup("refused", "127.0.0.1", 2, "gloo", timeout_s=100)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="a member reported failure"):
        group.join(lambda: True)
    assert time.monotonic() - began < SOON_S
    group.abandon()


def test_a_broadcast_that_nobody_takes_is_given_up_in_time() -> None:
    command = [sys.executable, "-c", PEER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        assert peer.stdout.readline() == "imported\n"
        group = UpdateProcessGroup("stuck", "127.0.0.1", 2, "gloo", timeout_s=2)
        peer.stdin.write(f"{group.name} {group.port}\n")
        peer.stdin.flush()
        group.join(lambda: False)
        began = time.monotonic()
        with pytest.raises(WeightSyncError, match=r"did not complete within 2 s|Timed out"):
            group.broadcast([torch.zeros(64 << 20, dtype=torch.uint8)], lambda: False)
        group.abandon()
        assert time.monotonic() - began < SOON_S
        peer.kill()
