"""A process of a job that ends while it joins an update group that was given up."""

import time
from typing import Any

import torch.distributed as dist

from areal_hpc.errors import WeightSyncError
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE
from areal_hpc.weights.process_group import UpdateProcessGroup

JOIN_TIMEOUT_S = 4.0
"""Torch's own: then the call that joins returns."""


class _SlowToDelete:
    """Makes the end of the interpreter last until then."""

    def __del__(self, sleep: Any = time.sleep) -> None:
        sleep(2 * JOIN_TIMEOUT_S)


KEPT = _SlowToDelete()


def run(config: dict[str, Any]) -> None:
    """Join a group whose member vanishes at once, give it up, and end as at a stop."""
    group = UpdateProcessGroup("group", "127.0.0.1", 2, "gloo", JOIN_TIMEOUT_S)
    member = dist.TCPStore("127.0.0.1", group.port, is_master=False)  # type: ignore[attr-defined]
    member.set("where", "nowhere")
    began = time.monotonic()
    try:
        group.join(lambda: time.monotonic() - began > 0.5)
    except WeightSyncError as error:
        print(error, flush=True)
    group.abandon()
    raise SystemExit(STOPPED_EXIT_CODE)
